"""State for restarts: deterministic seeds, a restart budget that stops crash loops, and the last results."""

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
"""Info key that marks a step as not executed because the environment was restarted."""

RESTARTS_OF_A_NODE = 1 << 20
"""First restart number on a replacement node. The exact count of the lost node is unknown."""

_MOST_RESTARTS = 5
_WINDOW_S = 60.0


def restart_seed(seed: int | None, env_id: int, restart: int) -> int | None:
    """Returns the seed of a restarted environment, or None if the environment never had a seed.

    >>> restart_seed(7, env_id=3, restart=1) == restart_seed(7, env_id=3, restart=1)
    True
    """
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, env_id, restart]).generate_state(1)[0])


class RestartBudget:
    """Allows five restarts within a minute for each key. More restarts count as a crash loop.

    Time spent waiting for a hung or starting worker does not count toward the minute. Otherwise a failure that takes
    longer than 12 s to detect could repeat without limit.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._hung_s: dict[int, float] = {}

    def spend(self, key: int, hung_s: float = 0.0) -> bool:
        """Records a restart and returns whether it is allowed.

        Args:
            key: Identifies the environment or worker.
            hung_s: Seconds that the pool waited before it declared a hang, or that the worker had spent starting.
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
        """Returns the rule as text for errors."""
        return f"at most {_MOST_RESTARTS} restarts within {_WINDOW_S:.0f} s"


def store_seed(books: Mapping[str, NDArray[Any]], row: int, seed: int) -> None:
    """Stores an environment's seed in arrays that outlive the process that steps the environment."""
    books["seed"][row], books["has_seed"][row] = seed % (1 << 64), True


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of a lost node's environments, from which a replacement node resumes.

    Attributes:
        obs: Last observation of each environment, tree of ``[n, *obs_shape]``, or ``object [n]``.
        seeds: Seed of each environment.
        restarts: Restart number of each environment, ``int64 [n]``. Later restarts count on from it.
        cut: Whether each environment was in the middle of an episode, ``bool [n]``.
    """

    obs: Tree
    seeds: Sequence[int | None]
    restarts: NDArray[np.int64]
    cut: NDArray[np.bool_]

    def restore(self, obs: Tree, books: Mapping[str, NDArray[Any]]) -> None:
        """Writes the state into the arrays of the replacement node."""
        for array, kept in zip(tree_leaves(obs), tree_leaves(self.obs), strict=True):
            array[:] = kept
        for row, seed in enumerate(self.seeds):
            if seed is not None:
                store_seed(books, row, seed)
        books["restarts"][:] = self.restarts
        books["cut"][:] = self.cut
        books["started"][:] = True


class LastAnswers:
    """The last complete result of each environment. An interrupted episode ends with it.

    Only pools that restart environments keep these copies. A worker may die while it writes to shared memory, so the
    shared arrays can't be trusted.

    Args:
        obs: Observations to copy, tree of ``[N, *obs_shape]``. None if observations are objects.
        num_envs: The number of environments N.
        stays: Array for what :meth:`started` records, ``bool [N]``, if another process shares it.

    Attributes:
        obs: Last observation of each environment, in separate arrays.
    """

    def __init__(self, obs: Tree, num_envs: int, stays: NDArray[np.bool_] | None = None) -> None:
        self.obs: Tree = None if obs is None else tree_map(np.copy, obs)
        self._leaves = [] if obs is None else list(tree_leaves(self.obs))
        self._done = np.ones(num_envs, bool)
        self._stays = np.zeros(num_envs, bool) if stays is None else stays

    def started(self, select: Any, stays: bool) -> None:
        """Records a new command. `stays` says whether it always leaves the environments inside an episode."""
        self._stays[select] = stays

    def keep(self, select: Any, obs: Tree, terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Stores new results. The arrays hold rows only for `select`."""
        self._done[select] = (terminated | truncated) & ~self._stays[select]
        if self._leaves:
            for kept, array in zip(self._leaves, tree_leaves(obs), strict=True):
                kept[select] = array

    def mid_episode(self, select: Any) -> NDArray[np.bool_]:
        """Returns which environments were in the middle of an episode at their last result, ``bool [k]``."""
        going_on: NDArray[np.bool_] = ~self._done[select]
        return going_on

    def restore(self, select: Any, obs: Tree) -> None:
        """Writes the last observations of the environments in `select` back into `obs`, which holds all of them."""
        for kept, array in zip(self._leaves, tree_leaves(obs) if self._leaves else (), strict=True):
            array[select] = kept[select]
