"""Ranks that are threads of this process, for the mathematics of several ranks without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class ThreadRanks:
    """One of several ranks that sum through a list that they share."""

    def __init__(self, rank: int, shared: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def sum_(self, tensor: Tensor) -> Tensor:
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait()
        first, *others = self._shared
        assert first is not None
        total = first.clone()
        for other in others:
            total += other
        self._barrier.wait()
        return tensor.copy_(total)


class Apart(ThreadRanks):
    """A rank that keeps what it has to itself, though it says that there are others."""

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_floating_point() else super().sum_(tensor)


def on_ranks(size: int, work: Callable[[ThreadRanks], T], kind: type[ThreadRanks] = ThreadRanks) -> list[T]:
    """Returns what `work` returns on each of `size` ranks."""
    shared: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size, timeout=60)

    def guarded(rank: int) -> T:
        try:
            return work(kind(rank, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))
