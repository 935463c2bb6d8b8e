"""State for restarts: deterministic seeds, a restart budget that stops crash loops, and the last results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Tree, tree_leaves, tree_map
from rayvec.fleet.restarts import (
    ENV_ARRAYS,
    RESTARTED,
    EpisodeState,
    RestartBudget,
    restart_seed,
    seed_of,
    store_seed,
)

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


RESTARTS_OF_A_NODE = 1 << 20
"""First restart number on a replacement node. The exact count of the lost node is unknown."""


def is_restarted(info: Any) -> bool:
    """Whether the info of an environment says that it was restarted."""
    return isinstance(info, dict) and info.get(RESTARTED) is True


def are_restarted(columns: Any) -> bool:
    """Whether the infos of a sub-batch say that all its environments were restarted."""
    mark = columns.get(RESTARTED) if isinstance(columns, dict) else None
    return isinstance(mark, np.ndarray) and mark.dtype == bool and bool(mark.all())


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
