"""Inference in one process: a policy acts over all environments of a pool, chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, RolloutTimes, StepBatch
from rayvec.pools.base import Cut, EnvPool
from rayvec.rollout.loop import ActingPolicy, Stopwatch, rollout
from rayvec.rollout.recorder import Empty

__all__ = ["Inference"]


class Inference:
    """Takes chunks, and knows in which environments an episode began that the policy has not seen.

    A recurrent policy resets its hidden state there.

    Args:
        num_envs: The number of environments N.
        groups: Partition of their ids: the policy acts on one group while the next one steps. One group by default.

    Attributes:
        groups: The partition.
    """

    def __init__(self, num_envs: int, groups: Sequence[NDArray[np.int64]] | None = None) -> None:
        self.groups = groups
        self._begun = np.zeros(num_envs, bool)
        self._acted: ActingPolicy | None = None

    def note_reset(self, env_ids: NDArray[np.int64]) -> None:
        """Records environments that are reset outside of chunks."""
        self._begun[env_ids] = True

    def note_ended(self, batch: StepBatch) -> None:
        """Records episodes that ended in steps outside of chunks."""
        rows = slice(None) if len(batch.env_ids) == len(self._begun) else batch.env_ids
        self._begun[rows] |= batch.terminated | batch.truncated

    def note_absence(self) -> None:
        """Records that another policy has acted, so that the next policy begins an episode in every environment."""
        self._acted = None

    def take(
        self,
        pool: EnvPool,
        policy: ActingPolicy,
        num_steps: int,
        first_step: int,
        noise_seed: int,
        weights_version: int,
        cut: Cut | None = None,
        empty: Empty = np.empty,
    ) -> tuple[Chunk, RolloutTimes]:
        """Takes a chunk; the arguments are those of :func:`rayvec.rollout.loop.rollout`."""
        stopwatch = Stopwatch()
        begun = np.flatnonzero(self._begun) if policy is self._acted else np.arange(pool.num_envs)
        self._acted = policy
        chunk = rollout(
            pool,
            policy,
            num_steps,
            noise_seed=noise_seed,
            first_step=first_step,
            groups=self.groups,
            weights_version=weights_version,
            begun=begun,
            stopwatch=stopwatch,
            empty=empty,
            cut=cut,
        )
        self._begun[:] = False
        return chunk, stopwatch.read()
