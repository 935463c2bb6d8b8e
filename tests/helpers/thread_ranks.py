"""Ranks that are threads of this process, for the mathematics of several ranks without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from helpers.waiting import DEADLINE_S
from rayvec.data import Batch

T = TypeVar("T")
L = TypeVar("L", bound=Any)


class ThreadRanks:
    """One of several ranks that sum through a list that they share."""

    def __init__(self, rank: int, shared: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait()
        first, *others = self._shared
        assert first is not None
        total = first.clone()
        for other in others:
            total += other
        self._barrier.wait()
        return tensor.copy_(total)


def on_ranks(size: int, work: Callable[[ThreadRanks], T], kind: type[ThreadRanks] = ThreadRanks) -> list[T]:
    """Returns what `work` returns on each of `size` ranks."""
    shared: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size, timeout=DEADLINE_S)

    def guarded(rank: int) -> T:
        try:
            return work(kind(rank, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def shard(batch: Batch, start: int, stop: int) -> Batch:
    """Returns what a rank with these columns gets of a batch."""
    return Batch(tuple(chunk.columns(start, stop) for chunk in batch.chunks), batch.stats)


def learn_on_ranks(
    make: Callable[[], L], batches: Sequence[Batch], bounds: Sequence[int], kind: type[ThreadRanks] = ThreadRanks
) -> tuple[list[L], list[list[dict[str, float]]]]:
    """Learns from batches on ranks that have the columns between `bounds`; returns each rank's learner and metrics."""

    def work(ranks: ThreadRanks) -> tuple[L, list[dict[str, float]]]:
        learner = make()
        learner.ranks = ranks
        start, stop = bounds[ranks.rank : ranks.rank + 2]
        return learner, [learner.update(shard(batch, start, stop)) for batch in batches]

    learners, metrics = zip(*on_ranks(len(bounds) - 1, work, kind), strict=True)
    return list(learners), list(metrics)
