"""Inference in the driver: a policy acts for one group of environments while the other group steps."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayvec.data import ChunkRequest, Rollout
from rayvec.data.topology import split_groups
from rayvec.node.object_store import as_rollout
from rayvec.pools.base import ActingPool, Cut
from rayvec.rollout.inference import Inference
from rayvec.rollout.loop import as_policy

__all__ = ["DriverInference"]

_TRIALS = (1, 2, 1, 2)
"""Number of groups in the first chunks with ``groups="auto"``. The first two chunks are warm-up."""


class DriverInference(Inference):
    """Collects chunks with a policy in the driver, and chooses the number of groups.

    Args:
        pool: The pool to step.
        groups: Number of groups. ``"auto"`` tries 1 and 2 in the first four chunks and keeps the faster.
    """

    groups: tuple[NDArray[np.int64], ...]

    def __init__(self, pool: ActingPool, groups: Literal[1, 2, "auto"]) -> None:
        self._pool = pool
        self._unit_bounds = pool.spaces.unit_bounds
        several = self._unit_bounds is None or len(self._unit_bounds) > 2
        self._undecided = groups == "auto" and several
        self._trials_s: list[float] = []  # seconds per step, one entry per chunk
        super().__init__(pool.num_envs, self._split(2 if groups == 2 else 1))

    def rollout(self, policy: Any, request: ChunkRequest, weights_version: int, cut: Cut | None) -> Rollout:
        """Takes a chunk.

        Args:
            policy: As of :func:`rayvec.rollout.loop.as_policy`.
            request: How many steps, and which noise.
            weights_version: Written into the chunk.
            cut: As of :func:`rayvec.rollout.loop.rollout`.
        """
        chunk, times = self.take(self._pool, as_policy(policy), request, weights_version, cut)
        if self._undecided:
            self._try_next(times.whole_s / chunk.num_steps)
        return as_rollout(chunk, False, (times,), times.whole_s)

    def _try_next(self, step_s: float) -> None:
        """Records the seconds that a step took, and selects the groups of the next chunk."""
        self._trials_s.append(step_s)
        if len(self._trials_s) < len(_TRIALS):
            groups = _TRIALS[len(self._trials_s)]
        else:
            one_s, two_s = self._trials_s[-2:]
            groups, self._undecided = (2 if two_s < one_s else 1), False
        self.groups = self._split(groups)

    def _split(self, groups: int) -> tuple[NDArray[np.int64], ...]:
        return split_groups(self._pool.topology, groups, self._unit_bounds)
