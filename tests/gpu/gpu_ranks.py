"""Ranks in processes of their own, one GPU for both or one for each."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
from helpers.device_cases import CASES
from helpers.thread_ranks import shard

from rayvec.distributed.allreduce_torch import CollectiveRanks

__all__ = ["LIMIT_S", "learn", "lose_a_rank", "on_two_ranks"]

LIMIT_S = 120.0
BOUNDS = (0, 2, 4)
"""Which environments each rank has."""


def learn(ranks: CollectiveRanks, device: str, case_id: str) -> Any:
    """Returns the weights after two updates."""
    (case,) = (each for each in CASES if str(each) == case_id)
    learner = case.learner(device)
    learner.ranks = ranks
    for batch in case.batches(2):
        learner.update(shard(batch, *BOUNDS[ranks.rank : ranks.rank + 2]))
    return learner.weights()


def lose_a_rank(ranks: CollectiveRanks, device: str, case_id: str) -> Any:
    """Ends one rank, so that the other one's sum comes too late; returns what that one raises."""
    ranks.sum_(torch.ones(3, device=device))
    if ranks.rank == 1:
        os._exit(0)
    try:
        ranks.sum_(torch.ones(3, device=device))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_two_ranks(work: Callable[..., Any], backend: str, devices: tuple[str, str], case_id: str = "") -> list[Any]:
    """Returns what `work` returns on each rank, None where a rank has ended without an answer.

    Args:
        work: Of the rank, its device and `case_id`.
        backend: ``"gloo"`` or ``"nccl"``.
        devices: Of each rank.
        case_id: Of the learner.
    """
    with tempfile.TemporaryDirectory(prefix="rayvec-store-") as directory:
        return _answers(work, backend, devices, f"{directory}/ranks", case_id)


def _answers(work: Callable[..., Any], backend: str, devices: tuple[str, str], path: str, case_id: str) -> list[Any]:
    context = get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in devices]
    processes = [
        context.Process(target=_run, args=(work, backend, rank, device, path, case_id, pipes[rank][1]), daemon=True)
        for rank, device in enumerate(devices)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    answers = []
    for (reader, _), process in zip(pipes, processes, strict=True):
        try:
            answers.append(reader.recv() if reader.poll(LIMIT_S) else f"no answer within {LIMIT_S:g} s")
        except EOFError:
            answers.append(None)
        process.join(5)
        process.kill()
    return answers


def _run(work: Callable[..., Any], backend: str, rank: int, device: str, path: str, case_id: str, pipe: Any) -> None:
    try:
        torch.set_num_threads(1)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        store = torch.distributed.FileStore(path, 2)
        kind = "cuda" if backend == "nccl" else "cpu"
        ranks = CollectiveRanks(rank, 2, store, device=kind, timeout_s=20)
        pipe.send(work(ranks, device, case_id))
        ranks.close()
    except Exception:
        pipe.send(traceback.format_exc())
