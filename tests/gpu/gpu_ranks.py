"""What ranks in processes of their own do, one GPU for both or one for each."""

from __future__ import annotations

import os
from typing import Any

import torch
from helpers.device_cases import CASES
from helpers.thread_ranks import shard

from rayvec.distributed.allreduce_torch import CollectiveRanks

BOUNDS = (0, 2, 4)
"""Which environments each rank has."""


def learn(ranks: CollectiveRanks, devices: tuple[str, str], case_id: str) -> Any:
    """Returns the weights after two updates."""
    (case,) = (each for each in CASES if str(each) == case_id)
    learner = case.learner(devices[ranks.rank])
    learner.ranks = ranks
    for batch in case.batches(2):
        learner.update(shard(batch, *BOUNDS[ranks.rank : ranks.rank + 2]))
    return learner.weights()


def lose_a_rank(ranks: CollectiveRanks, devices: tuple[str, str]) -> Any:
    """Ends one rank, so that the other one's sum comes too late."""
    ranks.all_reduce_(torch.ones(3, device=devices[ranks.rank]))
    if ranks.rank == 1:
        os._exit(0)
    return ranks.all_reduce_(torch.ones(3, device=devices[ranks.rank]))
