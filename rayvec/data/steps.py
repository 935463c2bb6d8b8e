"""What environments return from one step or reset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.trees import Tree, tree_map

__all__ = ["StepBatch"]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The answers of k environments to one step or one reset.

    Attributes:
        env_ids: Whose answers, ``int64 [k]``; row i of everything else belongs to ``env_ids[i]``.
        obs: Observations, tree of ``[k, *obs_shape]``.
        rew: Rewards, ``float64 [k]``; 0 after a reset.
        terminated: ``bool [k]``.
        truncated: ``bool [k]``.
        info: Columns, as Gymnasium merges infos.
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
