"""Ranks that are processes of this machine, without Ray, and what they do in tests."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore

from rayvec.distributed.allreduce_shared_memory import SharedMemoryRanks
from rayvec.distributed.allreduce_torch import CollectiveRanks
from rayvec.learners.ranks import Ranks

_ANSWER_S = 100


def on_processes(size: int, work: Callable[..., Any], *args: Any, kind: str, timeout_s: float = 60.0) -> list[Any]:
    """Returns what ``work(ranks, *args)`` returns or raises on each rank; None for one that ended.

    `kind` is ``"shared memory"``, ``"collective"`` or, with a GPU for each rank, ``"nccl"``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(size):
            ours, theirs = context.Pipe()
            connect = (rank, size, theirs, None if kind == "shared memory" else f"{directory}/store", timeout_s, kind)
            process = context.Process(target=_be_rank, args=(connect, work, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            if kind == "shared memory":
                path = pipes[0].recv()
                for pipe in pipes[1:]:
                    pipe.send(path)
            return [_receive(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(pipe: Connection) -> Any:
    try:
        assert pipe.poll(_ANSWER_S), "a rank hangs"
        return pipe.recv()
    except EOFError:
        return None


def _be_rank(connect: tuple[Any, ...], work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    for _ in range(1024):  # as where a rank has many workers
        os.dup(0)
    ranks, pipe = _connect(*connect), connect[2]
    try:
        result = work(ranks, *args)
    except Exception as error:
        result = error
        ranks.close()  # as the ranks of a group do
    pipe.send(result)
    pipe.recv()  # until the test ends this process: what one rank holds, others may still need


def _connect(rank: int, size: int, pipe: Connection, store: str | None, timeout_s: float, kind: str) -> Ranks:
    if store is not None:
        if kind == "nccl":
            torch.cuda.set_device(rank)
        device = "cuda" if kind == "nccl" else "cpu"
        return CollectiveRanks(rank, size, FileStore(store, size), device=device, timeout_s=timeout_s)
    ranks = SharedMemoryRanks(rank, size, None if rank == 0 else pipe.recv(), timeout_s=timeout_s)
    if rank == 0:
        pipe.send(ranks.path)
    return ranks


def tensor_of(rank: int, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns what a rank brings to a sum."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**40), 2**40, shape, generator=generator).to(dtype)


def sum_of_length(ranks: Ranks, lengths: tuple[int, ...]) -> Tensor:
    return ranks.all_reduce_(torch.ones(lengths[ranks.rank]))


def sum_each(ranks: Ranks, cases: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Returns the sums of given dtypes and shapes."""
    return [ranks.all_reduce_(tensor_of(ranks.rank, number, *case)) for number, case in enumerate(cases)]


def sum_at_random(ranks: Ranks, count: int, seed: int) -> int:
    """Sums tensors of random sizes with random pauses; returns how many sums differ from those in rank order."""
    common, own = random.Random(seed), random.Random(1000 * seed + ranks.rank)
    wrong = 0
    for number in range(count):
        shape = (int(10 ** common.uniform(0, 4.8)),)
        expected = tensor_of(0, number, torch.float32, shape)
        for rank in range(1, ranks.size):
            expected += tensor_of(rank, number, torch.float32, shape)
        if own.random() < 0.1:
            time.sleep(own.uniform(0, 0.003))
        wrong += not torch.equal(ranks.all_reduce_(tensor_of(ranks.rank, number, torch.float32, shape)), expected)
    return wrong


def fall_before_second_sum(ranks: Ranks, who: int, how: str) -> list[Tensor]:
    """Sums once; then one rank ends, stops or leaves, and the others come to the next sum."""
    first = ranks.all_reduce_(torch.ones(3))
    if ranks.rank == who:
        if how == "close":
            ranks.close()
            return [first]
        fall(how)
    return [first, ranks.all_reduce_(torch.ones(3))]


def fall(how: str) -> None:
    """Lets this process end, stop, or raise."""
    if how == "raise":
        raise ZeroDivisionError("as asked")
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), getattr(signal, how))
