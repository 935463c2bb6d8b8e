"""Joins the answers of several nodes into one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayvec.data import RawInfo, StepBatch, SubBatchInfo
from rayvec.data.layouts import ArrayLayout, index_tree
from rayvec.pools.ids_by_owner import Plan
from rayvec.pools.restart_state import LastAnswers

__all__ = ["JoinedAnswers"]


class JoinedAnswers(LastAnswers):
    """Arrays of all environments. A single copy into them both joins the answers and stores the last ones.

    Args:
        layout: Layout of observations; None if they are objects.
        num_envs: N.
    """

    def __init__(self, layout: ArrayLayout | None, num_envs: int) -> None:
        super().__init__(np.full(num_envs, None) if layout is None else layout.empty((num_envs,)), num_envs)
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
        for part, batch in zip(plan.parts, batches, strict=True):
            self.keep(part.of_all, batch.obs, batch.terminated, batch.truncated)
            self._rew[part.of_all] = batch.rew
            self._terminated[part.of_all] = batch.terminated
            self._truncated[part.of_all] = batch.truncated
        select = plan.select
        return StepBatch(
            plan.ids,
            index_tree(self.obs, select),
            self._rew[select],
            self._terminated[select],
            self._truncated[select],
            _join_infos(plan, batches),
        )


def _join_infos(plan: Plan, batches: Sequence[StepBatch]) -> tuple[RawInfo, ...]:
    """Returns the infos of all parts in the order of the plan."""
    if not any([batch.info for batch in batches]):
        return ()
    infos = {info.env_id: info for batch in batches for info in batch.info}
    if any(isinstance(info, SubBatchInfo) for info in infos.values()):
        return tuple(infos[env_id] for env_id in sorted(infos))
    return tuple(infos[env_id] for env_id in plan.ids.tolist() if env_id in infos)
