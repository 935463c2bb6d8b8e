"""Straggler mitigation: counts the ranks that have taken the steps of an iteration, so that the others stop.

A rank that has its steps says so and then waits for the others, whose environments may be slower. No rank waits inside
a sum for environments, so the time limit of sums stays that of computing.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from rayvec.data.chunk import StopEarly
from rayvec.node.shared_memory import anonymous_file

_POLL_INTERVAL_S = 0.001
_MIN_SHARE = 0.25


class Arrivals(Protocol):
    """Which ranks have arrived, as one of them sees it."""

    def arrive(self, iteration: int) -> None:
        """Says that this rank has the steps of an iteration; iterations are numbered from 1."""
        ...

    def have_arrived(self, iteration: int, count: int) -> bool:
        """Whether so many ranks have arrived, without waiting. The answer may be a few milliseconds old.

        Raises:
            RankLostError: The process that counts them has ended.
        """
        ...


class SharedArrivals:
    """Arrivals of the ranks of one machine. Each writes the number of its iteration into memory that all share.

    Args:
        path: Of the memory, see `open`.
        rank: Number of this rank.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._iterations = np.memmap(path, np.int64, "r+")
        self._rank = rank

    @staticmethod
    @contextlib.contextmanager
    def open(size: int) -> Iterator[str]:
        """Yields the path of new memory for the arrivals of so many ranks of this machine."""
        fd = anonymous_file("rayvec-arrivals", 8 * size)
        try:
            yield f"/proc/{os.getpid()}/fd/{fd}"
        finally:
            os.close(fd)

    def arrive(self, iteration: int) -> None:
        """See :class:`Arrivals`."""
        self._iterations[self._rank] = iteration

    def have_arrived(self, iteration: int, count: int) -> bool:
        """See :class:`Arrivals`."""
        return bool((self._iterations >= iteration).sum() >= count)


class Stragglers:
    """When a rank stops collecting, and how it waits for the others.

    Once `sync_fraction` of the ranks have their steps, a rank that has a quarter of its own stops (Wijmans et al.,
    "DD-PPO", ICLR 2020, arXiv:1911.00357, section 3). The update stays exact: it weighs each step of all ranks alike.

    With `variable_lengths`, the environments of a rank may take different numbers of steps. The rank stops once the sum
    of their steps is reached (Wijmans et al., "VER", 2022, arXiv:2210.05064). A worker ends its chunk early if the
    other workers would have to wait for its next step.

    Args:
        arrivals: Who has arrived.
        size: Number of ranks.
        sync_fraction: In (0, 1]; 1 stops no rank.
        variable_lengths: Whether environments may take different numbers of steps.

    Attributes:
        has_cut: Whether this rank was stopped in its current iteration because of the others.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        size: int,
        *,
        sync_fraction: float,
        variable_lengths: bool = False,
    ) -> None:
        self.has_cut = False
        self._arrivals, self._size = arrivals, size
        self._enough = math.ceil(sync_fraction * size - 1e-9)
        self._variable_lengths = variable_lengths
        self._iteration = 0

    def begin(self, num_steps: int) -> tuple[int, StopEarly | None]:
        """Begins an iteration.

        Args:
            num_steps: What the environments of this rank are to take together.

        Returns:
            The most steps that they may take together, and what cuts the chunk, see
            :meth:`rayvec.Collector.collect`; None where nothing does.
        """
        self._iteration += 1
        self.has_cut = False
        others_may = self._enough < self._size

        def cut(taken: int) -> bool:
            self.has_cut = (
                others_may
                and taken >= _MIN_SHARE * num_steps
                and self._arrivals.have_arrived(self._iteration, self._enough)
            )
            return self.has_cut

        if self._variable_lengths:
            return 2 * num_steps, lambda taken: cut(taken) or taken >= num_steps
        return num_steps, cut if others_may else None

    def wait(self) -> None:
        """Says that this rank has its steps, and waits until every rank has.

        It waits as long as the environments of the others need. The driver ends all ranks if one of them is lost.
        """
        self._arrivals.arrive(self._iteration)
        while not self._arrivals.have_arrived(self._iteration, self._size):
            time.sleep(_POLL_INTERVAL_S)
