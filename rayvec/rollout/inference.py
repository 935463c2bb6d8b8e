"""Inference in one process: a policy acts over all environments of a pool, chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkRequest, RolloutTimes
from rayvec.data.chunk import Cut
from rayvec.rollout.column_recorder import Empty
from rayvec.rollout.loop import ActingPolicy, Stopwatch, rollout
from rayvec.rollout.stepper import Stepper

__all__ = ["Inference"]


class Inference:
    """Takes chunks, and knows where a recurrent policy must reset its hidden state.

    That is where an episode began outside of chunks, or everywhere if the policy has not seen the last steps.

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

    def note_reset(self, env_ids: NDArray[np.int64] | list[int]) -> None:
        """Records environments that are reset outside of chunks."""
        self._begun[env_ids] = True

    def note_absence(self) -> None:
        """Records steps outside of chunks, or by another policy."""
        self._acted = None

    def take(
        self,
        pool: Stepper,
        policy: ActingPolicy,
        request: ChunkRequest,
        weights_version: int,
        cut: Cut | None = None,
        empty: Empty = np.empty,
    ) -> tuple[Chunk, RolloutTimes]:
        """Takes the chunk of a request; the other arguments are those of :func:`rayvec.rollout.loop.rollout`."""
        stopwatch = Stopwatch()
        begun = np.flatnonzero(self._begun) if policy is self._acted else np.arange(pool.num_envs)
        chunk = rollout(
            pool,
            policy,
            request.num_steps,
            noise_seed=request.noise_seed,
            first_step=request.first_step,
            groups=self.groups,
            weights_version=weights_version,
            begun=begun,
            stopwatch=stopwatch,
            empty=empty,
            cut=cut,
        )
        self._begun[:] = False
        at_end = chunk.restarts[:, 0] == chunk.num_steps - 1  # the policy has not seen the episode that begins next
        self._begun[chunk.restarts[at_end, 1]] = True
        self._acted = policy  # only now: the pool's steps count as absence
        return chunk, stopwatch.read()
