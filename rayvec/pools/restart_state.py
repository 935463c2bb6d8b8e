"""State for restarts: deterministic seeds, a restart budget that stops crash loops, and the last results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Tree, tree_leaves, tree_map

__all__ = [
    "ENV_ARRAYS",
    "RESTARTED",
    "RESTARTS_OF_A_NODE",
    "EpisodeState",
    "LastAnswers",
    "NodeState",
    "RestartBudget",
    "are_restarted",
    "is_restarted",
    "restart_seed",
    "seed_of",
    "store_seed",
]

RESTARTED = "env_restarted"
"""Info key that marks a step as not executed because the environment was restarted."""

RESTARTS_OF_A_NODE = 1 << 20
"""First restart number on a replacement node. The exact count of the lost node is unknown."""

ENV_ARRAYS = {
    "rew": np.float64,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "seed": np.uint64,
    "has_seed": np.bool_,
    "restarts": np.int64,
    "episode": np.int8,
}
"""The arrays with one value for each environment. The results come first. The others outlive the stepping process."""

_MOST_RESTARTS = 5
_WINDOW_S = 60.0


class EpisodeState(IntEnum):
    """Where an environment is in its episode."""

    NEW = 0
    """The environment has never been reset."""
    RUNNING = 1
    """An episode has begun and has not ended."""
    ENDED = 2
    """The episode has ended. A reset begins the next one."""
    CUT = 3
    """A fault interrupted the episode. The next step reports that it is truncated."""


def restart_seed(seed: int | None, env_id: int, restart: int) -> int | None:
    """Returns the seed of a restarted environment, or None if the environment never had a seed.

    >>> restart_seed(7, env_id=3, restart=1) == restart_seed(7, env_id=3, restart=1)
    True
    """
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, env_id, restart]).generate_state(1)[0])


def is_restarted(info: Any) -> bool:
    """Whether the info of an environment says that it was restarted."""
    return isinstance(info, dict) and info.get(RESTARTED) is True


def are_restarted(columns: Any) -> bool:
    """Whether the infos of a sub-batch say that all its environments were restarted."""
    mark = columns.get(RESTARTED) if isinstance(columns, dict) else None
    return isinstance(mark, np.ndarray) and mark.dtype == bool and bool(mark.all())


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


def store_seed(arrays: Mapping[str, NDArray[Any]], row: int, seed: int) -> None:
    """Stores the seed of a requested reset in arrays that outlive the process that steps the environment."""
    arrays["seed"][row], arrays["has_seed"][row], arrays["restarts"][row] = seed % (1 << 64), True, 0


def seed_of(arrays: Mapping[str, NDArray[Any]], row: int, env_id: int) -> int | None:
    """Returns the last seed of an environment: that of its last restart after :func:`store_seed`, or the stored one.

    It is None for an environment that was never given a seed.
    """
    seed, restarts = int(arrays["seed"][row]) if arrays["has_seed"][row] else None, int(arrays["restarts"][row])
    return restart_seed(seed, env_id, restarts) if restarts else seed


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of a lost node's environments, from which a replacement node resumes.

    Attributes:
        obs: Last observation of each environment, tree of ``[n, *obs_shape]``, or ``object [n]``.
        seeds: Seed of each environment.
        restarts: Restart number of each environment, ``int64 [n]``. Later restarts continue from this number.
        cut: Whether each environment was in the middle of an episode, ``bool [n]``.
    """

    obs: Tree
    seeds: Sequence[int | None]
    restarts: NDArray[np.int64]
    cut: NDArray[np.bool_]

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Writes the state into the arrays of the replacement node."""
        for array, kept in zip(tree_leaves(arrays["obs"]), tree_leaves(self.obs), strict=True):
            array[:] = kept
        for row, seed in enumerate(self.seeds):
            if seed is not None:
                store_seed(arrays, row, seed)
        arrays["restarts"][:] = self.restarts
        arrays["episode"][:] = np.where(self.cut, EpisodeState.CUT, EpisodeState.ENDED)


class LastAnswers:
    """The last complete result of each environment. An interrupted episode ends with it.

    Only pools that restart environments keep these copies. A worker may die while it writes to shared memory, so the
    shared arrays can't be trusted.

    Args:
        obs: Observations to copy, tree of ``[N, *obs_shape]``. None if observations are objects.
        num_envs: The number of environments N.

    Attributes:
        obs: Last observation of each environment, in separate arrays.
    """

    def __init__(self, obs: Tree, num_envs: int) -> None:
        self.obs: Tree = None if obs is None else tree_map(np.copy, obs)
        self._leaves = [] if obs is None else list(tree_leaves(self.obs))
        self._done = np.ones(num_envs, bool)
        self._resets = np.zeros(num_envs, bool)

    def requested(self, select: Any, *, resets: bool) -> None:
        """Records a new command. `resets` says whether it resets environments, also those whose episode it ends."""
        self._resets[select] = resets

    def keep(self, select: Any, obs: Tree, terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Stores new results. The arrays hold rows only for `select`."""
        self._done[select] = (terminated | truncated) & ~self._resets[select]
        if self._leaves:
            for kept, array in zip(self._leaves, tree_leaves(obs), strict=True):
                kept[select] = array

    def mid_episode(self, select: Any) -> NDArray[np.bool_]:
        """Returns which environments were in the middle of an episode at their last result, ``bool [k]``."""
        unfinished: NDArray[np.bool_] = ~self._done[select]
        return unfinished

    def restore(self, select: Any, obs: Tree) -> None:
        """Writes the last observations of the environments in `select` back into `obs`, which holds all of them."""
        for kept, array in zip(self._leaves, tree_leaves(obs) if self._leaves else (), strict=True):
            array[select] = kept[select]
