"""Joins the answers of several nodes into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import RawInfo, StepBatch, Tree, tree_leaves, tree_map
from rayvec.pools.memory import index_tree
from rayvec.pools.plan import Plan
from rayvec.pools.restarts import LastAnswers

__all__ = ["JoinedAnswers"]


class JoinedAnswers(LastAnswers):
    """Arrays of all environments. A single copy into them both joins the answers and stores the last ones.

    Args:
        obs: Tree of ``[N, *obs_shape]`` whose shapes and dtypes the arrays get.
        num_envs: N.
    """

    def __init__(self, obs: Tree, num_envs: int) -> None:
        super().__init__(obs, num_envs)
        self._rew = np.zeros(num_envs)
        self._terminated = np.zeros(num_envs, bool)
        self._truncated = np.zeros(num_envs, bool)

    def join(self, plan: Plan, batches: Sequence[StepBatch]) -> StepBatch:
        """Stores the answers and returns them as one batch.

        Args:
            plan: Plan of the environments that have answered.
            batches: The answers of each part of the plan.

        Returns:
            The answers in the order of the plan; views of this object's arrays if the plan's ids are consecutive.
        """
        infos = _join_infos(plan, batches) if any([batch.info for batch in batches]) else ()
        if not isinstance(plan.select, slice):
            return self._join_scattered(plan, batches, infos)
        rows = plan.rows
        if rows is None:
            rows = plan.rows = self.batch(plan.ids, plan.select)
        np.concatenate([batch.rew for batch in batches], out=rows.rew)
        np.concatenate([batch.terminated for batch in batches], out=rows.terminated)
        np.concatenate([batch.truncated for batch in batches], out=rows.truncated)
        self._done[plan.select] = (rows.terminated | rows.truncated) & ~self._resets[plan.select]
        if isinstance(rows.obs, np.ndarray):
            np.concatenate([batch.obs for batch in batches], out=rows.obs)
        else:
            for out, *leaves in zip(*map(tree_leaves, (rows.obs, *(batch.obs for batch in batches))), strict=True):
                np.concatenate(leaves, out=out)
        return self.batch(plan.ids, plan.select, infos) if infos else rows

    def batch(self, ids: NDArray[np.int64], select: Any, infos: tuple[RawInfo, ...] = ()) -> StepBatch:
        """Returns the last answers of some environments."""
        return StepBatch(
            ids,
            index_tree(self.obs, select),
            self._rew[select],
            self._terminated[select],
            self._truncated[select],
            infos,
        )

    def _join_scattered(self, plan: Plan, batches: Sequence[StepBatch], infos: tuple[RawInfo, ...]) -> StepBatch:
        """Joins the answers of environments with non-consecutive ids into newly allocated arrays."""
        order = np.argsort(np.concatenate([part.places for part in plan.parts]))

        def join(*leaves: NDArray[Any]) -> NDArray[Any]:
            joined: NDArray[Any] = np.concatenate(leaves)[order]
            return joined

        joined = StepBatch(
            plan.ids,
            tree_map(join, *(batch.obs for batch in batches)),
            join(*(batch.rew for batch in batches)),
            join(*(batch.terminated for batch in batches)),
            join(*(batch.truncated for batch in batches)),
            infos,
        )
        self._rew[plan.select] = joined.rew
        self._terminated[plan.select] = joined.terminated
        self._truncated[plan.select] = joined.truncated
        self.keep(plan.select, joined.obs, joined.terminated, joined.truncated)
        return joined


def _join_infos(plan: Plan, batches: Sequence[StepBatch]) -> tuple[RawInfo, ...]:
    """Returns the infos of all parts in the order of the plan."""
    infos = {info.env_id: info for batch in batches for info in batch.info}
    return tuple(infos[env_id] for env_id in plan.ids.tolist() if env_id in infos)
