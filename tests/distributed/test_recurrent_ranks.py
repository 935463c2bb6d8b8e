"""Recurrent PPO and IMPALA on several ranks give the weights that they give on one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import BOX, DISCRETE, MASKED, OBS, STATS, distance, impala_config, make_chunk, ppo_config
from helpers.thread_ranks import learn_on_ranks
from torch import Tensor

from rayvec.data import Batch
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.policy import Policy
from rayvec.policies.recurrent import RecurrentActorCritic

N, T = 7, 11
SPLITS = [
    [0, 3, N],
    pytest.param([0, 0, N], marks=pytest.mark.slow),
    pytest.param([0, 1, 4, 4, N], marks=pytest.mark.slow),
]
CELLS = pytest.mark.parametrize("kind", ["gru", "lstm"])
LEARNERS = pytest.mark.parametrize("algorithm", ["ppo", "impala"])


class DoubleRecurrent(RecurrentActorCritic):
    """A recurrent actor-critic that computes in float64."""

    def encode(self, obs: Any) -> Any:
        rows = torch.from_numpy(self.encoder(obs)).double()
        return (rows, torch.from_numpy(obs["action_mask"])) if self.is_masked else rows


def make_module(both: tuple[spaces.Space[Any], spaces.Space[Any]], kind: Any) -> RecurrentActorCritic:
    settings = {"recurrent_size": 6, "sequence_length": 4, "seed": 1}
    return RecurrentActorCritic(*both, (8,), kind=kind, masked=both[0] is MASKED, **settings)


def make_learner(algorithm: str, both: Any, kind: Any, compiled: bool = False) -> PPOLearner | IMPALALearner:
    module = make_module(both, kind).double()
    module.__class__ = DoubleRecurrent
    common = {"recurrent": kind, "sequence_length": 4, "num_envs": N, "num_steps": T, "compile": compiled}
    if algorithm == "ppo":
        config = ppo_config(**common, minibatch_size=20, target_kl=0.5, normalize_reward=True)
        return PPOLearner(*both, config, module=module)
    return IMPALALearner(*both, impala_config(**common, num_minibatches=3), module=module)


def make_batches(both: Any, kind: Any, count: int) -> list[Batch]:
    policy, common = Policy(make_module(both, kind)), {"num_steps": T, "num_envs": N, "invalid": True, "space": both[0]}
    chunks = [make_chunk(policy, seed, **common) for seed in range(2 * count)]
    return [Batch(tuple(chunks[first : first + 2]), STATS) for first in range(0, 2 * count, 2)]


def learn(
    algorithm: str, both: Any, cell: str, bounds: list[int], *, compiled: bool = False, **kwargs: Any
) -> tuple[list[Tensor], list[list[dict[str, float]]]]:
    make = partial(make_learner, algorithm, both, cell, compiled)
    learners, metrics = learn_on_ranks(make, make_batches(both, cell, 4), bounds, **kwargs)
    return [learner.state_dict()["parameters"] for learner in learners], metrics


@LEARNERS
@CELLS
@pytest.mark.parametrize(
    "both",
    [(OBS, DISCRETE), (MASKED, DISCRETE), pytest.param((OBS, BOX), marks=pytest.mark.slow)],
    ids=["discrete", "masked", "box"],
)
@pytest.mark.parametrize("bounds", SPLITS, ids=str)
def test_ranks_together_equal_one(algorithm: str, kind: str, both: Any, bounds: list[int]) -> None:
    """Even, uneven and empty shards, two chunks a batch, whose last sequences are shorter."""
    (expected,), (expected_metrics,) = learn(algorithm, both, kind, [0, N])
    parameters, metrics = learn(algorithm, both, kind, bounds)
    assert distance(parameters[0], expected) <= 1e-12
    assert all(torch.equal(each, parameters[0]) for each in parameters)
    for ours, theirs in zip(metrics[0], expected_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    start = make_learner(algorithm, both, kind).state_dict()["parameters"]
    assert distance(start, expected) > 0.01
