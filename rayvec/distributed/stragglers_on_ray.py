"""Arrivals of ranks on several nodes, counted by an actor of the Ray cluster.

A rank sends it two or three messages for each iteration.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.errors import RankLostError

__all__ = ["RayArrivals", "start_counter"]

_POLL_INTERVAL_S = 0.005


class ArrivalCounter:
    """Counts arrivals; runs as an actor, whose calls wait side by side."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._changed = asyncio.Condition()

    async def arrive(self, iteration: int) -> None:
        """Counts a rank."""
        async with self._changed:
            self._counts[iteration] = self._counts.get(iteration, 0) + 1
            self._counts.pop(iteration - 2, None)  # every rank is beyond it
            self._changed.notify_all()

    async def until(self, iteration: int, count: int) -> None:
        """Waits until so many ranks have arrived."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._counts.get(iteration, 0) >= count)


def start_counter() -> Any:
    """Starts an actor on this node that counts; it claims no core, and ends with its last handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(ArrivalCounter).options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=here)
    return actor.remote()


class RayArrivals:
    """Arrivals of ranks anywhere in a Ray cluster; see :class:`~rayvec.distributed.stragglers.Arrivals`.

    Args:
        counter: What `start_counter` returned.
        rank: Number of this rank.
    """

    def __init__(self, counter: Any, rank: int) -> None:
        self._counter = counter
        self._asked = (0, 0)
        self._answer: Any = None
        self._next_poll_s = 0.0

    def arrive(self, iteration: int) -> None:
        """See :class:`~rayvec.distributed.stragglers.Arrivals`."""
        self._counter.arrive.remote(iteration)

    def have_arrived(self, iteration: int, count: int) -> bool:
        """See :class:`~rayvec.distributed.stragglers.Arrivals`."""
        if (iteration, count) != self._asked:
            self._asked, self._answer = (iteration, count), self._counter.until.remote(iteration, count)
        if self._answer is not None and time.monotonic() >= self._next_poll_s:
            self._next_poll_s = time.monotonic() + _POLL_INTERVAL_S
            if ray.wait([self._answer], timeout=0)[0]:
                try:
                    self._answer = ray.get(self._answer)
                except ray.exceptions.RayError as error:
                    text = f"The actor that counts the arrivals of ranks has ended ({type(error).__name__})."
                    raise RankLostError(text) from error
        return self._answer is None
