"""Ranks in processes of their own, without Ray: how they sum, and how a benchmark asks them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from rayvec.bench.harness.task import receive, reported
from rayvec.distributed.collective import CollectiveRanks
from rayvec.distributed.shared_memory import SharedMemoryRanks
from rayvec.learners.ranks import ALONE, Ranks

__all__ = ["RankProcesses"]


class RankProcesses:
    """Processes that compute together.

    Args:
        size: How many.
        sums: ``"shared-memory"``, ``"gloo"``, or ``"ddp"``, which makes torch's default group, NCCL for ``cuda``.
        make: Makes what a rank computes from its `Ranks`, in its process: a function from a request to an answer.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, size: int, sums: str, make: Callable[[Ranks], Callable[[Any], Any]], device: str = "cpu"):
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            self._processes.append(
                context.Process(target=_serve, args=(make, sums, rank, size, device, theirs), daemon=True)
            )
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        address = receive(self._pipes[0])
        for pipe in self._pipes[1:]:
            pipe.send(address)
        for pipe in self._pipes:
            receive(pipe)

    def ask(self, request: Any) -> list[Any]:
        """Sends a request to all ranks; returns their answers."""
        for pipe in self._pipes:
            pipe.send(request)
        return [receive(pipe) for pipe in self._pipes]

    def close(self) -> None:
        """Ends them."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _serve(make: Any, sums: str, rank: int, size: int, device: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    with reported(pipe):
        compute = make(_join(sums, rank, size, device, pipe))
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            pipe.send(compute(request))
    if sums == "ddp":
        dist.destroy_process_group()


def _join(sums: str, rank: int, size: int, device: str, pipe: Connection) -> Ranks:
    """Connects the ranks; rank 0 sends where they meet, which the benchmark forwards to the others."""
    if sums == "shared-memory":
        if size == 1:
            pipe.send(None)
            return ALONE
        block = SharedMemoryRanks(rank, size, None if rank == 0 else pipe.recv())
        if rank == 0:
            pipe.send(block.path)
        return block
    path = tempfile.mkstemp(prefix="rayvec-ranks-")[1] if rank == 0 else pipe.recv()
    if rank == 0:
        pipe.send(path)
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]  # which deletes the file when the last rank ends
    if sums == "gloo":
        return CollectiveRanks(rank, size, store)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    return ALONE
