"""What environments return from one step or reset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data.trees import Tree, tree_map

__all__ = ["RawInfo", "StepBatch"]


class RawInfo(NamedTuple):
    """The infos that one environment returned from one step or reset, not merged with those of others.

    Attributes:
        env_id: Global index of the environment.
        info: The info dict as the environment returned it. After an automatic reset within the
            step, that of the reset.
        final_obs: The last observation of the episode that ended, where the reset followed within
            the step; else None.
        final_info: The info of the step that ended the episode, likewise; else None.
    """

    env_id: int
    info: dict[str, Any]
    final_obs: Any = None
    final_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The answers of k environments to one step or one reset.

    Attributes:
        env_ids: Whose answers, ``int64 [k]``; row i of everything else belongs to ``env_ids[i]``.
        obs: Observations, tree of ``[k, *obs_shape]``.
        rew: Rewards, ``float64 [k]``; 0 after a reset.
        terminated: ``bool [k]``.
        truncated: ``bool [k]``.
        info: From a pool, a tuple of :class:`RawInfo`, only for environments with a non-empty info, in the order of
            rows; of native sub-batches, a tuple of :class:`~rayvec.data.sub_batch_infos.SubBatchInfo`. From a vector
            environment, Gymnasium's merged dict.
    """

    env_ids: NDArray[np.int64]
    obs: Tree
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    info: Any = ()

    def copy(self) -> StepBatch:
        """Returns a copy with its own arrays; objects are shared."""
        return StepBatch(
            self.env_ids.copy(),
            tree_map(np.copy, self.obs),
            self.rew.copy(),
            self.terminated.copy(),
            self.truncated.copy(),
            self.info,
        )
