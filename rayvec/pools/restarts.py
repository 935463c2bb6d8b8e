"""Restarting what failed: seeds that are a function of the restart, and a budget that stops a crash loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Tree, tree_leaves, tree_map

__all__ = ["RESTARTED", "RESTARTS_OF_A_NODE", "LastAnswers", "NodeState", "RestartBudget", "restart_seed", "store_seed"]

RESTARTED = "env_restarted"
"""The key of an info dict that says: this step did not happen, the environment was made anew."""

RESTARTS_OF_A_NODE = 1 << 20
"""Where a node that takes the place of another goes on to count restarts: how far that one had come went with it."""

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
    """Allows five restarts within a minute, for each key; more are a crash loop, which restarting won't cure.

    Time that was spent on waiting for who hangs, or who ends while it starts, does not count: else what takes longer
    than a fifth of a minute could be repeated for ever.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._hung_s: dict[int, float] = {}

    def spend(self, key: int, hung_s: float = 0.0) -> bool:
        """Takes note of a restart; returns whether it is allowed.

        Args:
            key: Of what is restarted.
            hung_s: How long it was waited for before it was taken to hang, or had been starting when it ended.
        """
        self._hung_s[key] = self._hung_s.get(key, 0.0) + hung_s
        times = self._times.setdefault(key, deque())
        now = time.monotonic() - self._hung_s[key]
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
        obs: Last observation of each, tree of ``[n, *obs_shape]``, or ``object [n]``.
        seeds: Of each.
        restarts: Number of this restart of each, ``int64 [n]``; those that follow count on from it.
        cut: Whose episode was under way, ``bool [n]``.
    """

    obs: Tree
    seeds: Sequence[int | None]
    restarts: NDArray[np.int64]
    cut: NDArray[np.bool_]

    def restore(self, obs: Tree, books: Mapping[str, NDArray[Any]]) -> None:
        """Writes the state into the arrays of the node that takes the place."""
        for array, kept in zip(tree_leaves(obs), tree_leaves(self.obs), strict=True):
            array[:] = kept
        for row, seed in enumerate(self.seeds):
            if seed is not None:
                store_seed(books, row, seed)
        books["restarts"][:] = self.restarts
        books["cut"][:] = self.cut
        books["started"][:] = True


class LastAnswers:
    """What environments last answered, so that no more than that is told of an episode that is cut.

    Kept only where something is restarted: whoever ends may do so in the midst of writing.

    Args:
        obs: Tree of ``[N, *obs_shape]`` to be like; None where observations are objects.
        num_envs: N.
        stays: What :meth:`started` notes, ``bool [N]``, where that is shared with another process.

    Attributes:
        obs: Last observation of each environment, in arrays of its own.
    """

    def __init__(self, obs: Tree, num_envs: int, stays: NDArray[np.bool_] | None = None) -> None:
        self.obs: Tree = None if obs is None else tree_map(np.copy, obs)
        self._leaves = [] if obs is None else list(tree_leaves(self.obs))
        self._done = np.ones(num_envs, bool)
        self._stays = np.zeros(num_envs, bool) if stays is None else stays

    def started(self, select: Any, stays: bool) -> None:
        """Takes note of what was asked for: whether its answer leaves the environments in an episode in any case."""
        self._stays[select] = stays

    def keep(self, select: Any, obs: Tree, terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Takes note of answers, whose arrays have rows for `select` alone."""
        self._done[select] = (terminated | truncated) & ~self._stays[select]
        if self._leaves:
            for kept, array in zip(self._leaves, tree_leaves(obs), strict=True):
                kept[select] = array

    def mid_episode(self, select: Any) -> NDArray[np.bool_]:
        """Returns which environments were in the midst of an episode when they last answered."""
        going_on: NDArray[np.bool_] = ~self._done[select]
        return going_on

    def restore(self, select: Any, obs: Tree) -> None:
        """Writes the last observations of some environments back into arrays of all."""
        for kept, array in zip(self._leaves, tree_leaves(obs) if self._leaves else (), strict=True):
            array[select] = kept[select]
