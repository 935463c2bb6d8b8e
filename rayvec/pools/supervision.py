"""Restarting what failed: seeds that are a function of the restart, and a budget that stops a crash loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.types import Tree, tree_leaves

__all__ = ["RESTARTED", "NodeState", "RestartBudget", "restart_seed", "store_seed"]

RESTARTED = "env_restarted"
"""The key of an info dict that says: this step did not happen, the environment was made anew."""

_MOST_RESTARTS = 5
_WINDOW_S = 60.0


def restart_seed(seed: int | None, env_id: int, restart: int) -> int | None:
    """Returns the seed of an environment that was made anew, or None if it never had one.

    >>> restart_seed(7, env_id=3, restart=1) == restart_seed(7, env_id=3, restart=1)
    True
    """
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, env_id, restart]).generate_state(1)[0])


class RestartBudget:
    """Allows five restarts within a minute, for each key; more are a crash loop, which restarting won't cure."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}

    def spend(self, key: int) -> bool:
        """Takes note of a restart; returns whether it is allowed."""
        times = self._times.setdefault(key, deque())
        now = time.monotonic()
        while times and now - times[0] > _WINDOW_S:
            times.popleft()
        times.append(now)
        return len(times) <= _MOST_RESTARTS

    @staticmethod
    def rule() -> str:
        """What is allowed, for errors."""
        return f"at most {_MOST_RESTARTS} restarts within {_WINDOW_S:.0f} s"


def store_seed(books: Mapping[str, NDArray[Any]], row: int, seed: int) -> None:
    """Notes the seed of an environment where it outlives the process that steps it."""
    books["seed"][row], books["has_seed"][row] = seed % (1 << 64), True


@dataclass(frozen=True, slots=True)
class NodeState:
    """What a node's environments had come to when it was lost, for the node that takes its place.

    Attributes:
        obs: Last observation of each, tree of ``[n, *obs_shape]``; None where they are objects.
        seeds: Of each.
        restarts: How often each has been made anew, this time included, ``int64 [n]``.
        cut: Whose episode was under way, ``bool [n]``.
    """

    obs: Tree
    seeds: Sequence[int | None]
    restarts: NDArray[np.int64]
    cut: NDArray[np.bool_]

    def restore(self, obs: Tree, books: Mapping[str, NDArray[Any]]) -> None:
        """Writes the state into the arrays of the node that takes the place."""
        if self.obs is not None:
            for array, kept in zip(tree_leaves(obs), tree_leaves(self.obs), strict=True):
                array[:] = kept
        for row, seed in enumerate(self.seeds):
            if seed is not None:
                store_seed(books, row, seed)
        books["restarts"][:] = self.restarts
        books["cut"][:] = self.cut
        books["started"][:] = True
