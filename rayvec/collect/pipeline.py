"""Chunks that workers take for a collector: started ahead of use, finished in the order in which they started."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from rayvec.data import Rollout
from rayvec.pools.base import Cut
from rayvec.pools.publish_weights import WeightStore
from rayvec.vector.pool_adapter import PoolAdapter

__all__ = ["ChunkPipeline", "PendingChunk"]


class PendingChunk(NamedTuple):
    """A chunk that has been started and not finished.

    Attributes:
        store: The weights of the policy that takes it.
        version: Version of the weights that it is taken with.
        num_steps: T.
        is_ahead: As of `ChunkPipeline.start`.
        request: Likewise.
    """

    store: WeightStore
    version: int
    num_steps: int
    is_ahead: bool
    request: int


class ChunkPipeline:
    """Starts chunks and finishes them in order; numbers their steps, so that no noise is used twice.

    A wait that is interrupted leaves its chunk pending.

    Args:
        env: Takes the chunks.
        noise_seed: Seed of the policy's noise.
        by_reference: Whether chunks stay in the object store.
        part: Which part of the environments takes the chunks; None for all environments together.

    Attributes:
        pending: Chunks that have been started and not finished, oldest first.
        first_step: How many steps each environment could take in the chunks that are finished.
        noise_seed: Seed of the policy's noise.
    """

    def __init__(
        self, env: PoolAdapter, noise_seed: int, *, by_reference: bool = False, part: int | None = None
    ) -> None:
        self._env, self._by_reference, self._part = env, by_reference, part
        self.pending: deque[PendingChunk] = deque()
        self.first_step = 0
        self.noise_seed = noise_seed

    @property
    def pending_steps(self) -> int:
        """How many steps each environment takes in the pending chunks."""
        return sum(chunk.num_steps for chunk in self.pending)

    def start(self, store: WeightStore, num_steps: int, *, is_ahead: bool = False, request: int = 0) -> None:
        """Starts a chunk, taken with the newest weights of a policy.

        Args:
            store: The weights of the policy.
            num_steps: T.
            is_ahead: Whether it is for a later batch than the one that is being collected.
            request: How many chunks of all parts were started before it.
        """
        first_step = self.first_step + self.pending_steps
        self._env.rollout_async(
            store, num_steps, first_step, self.noise_seed, by_reference=self._by_reference, part=self._part
        )
        self.pending.append(PendingChunk(store, store.version, num_steps, is_ahead, request))

    def finish(self, cut: Cut | None = None) -> Rollout:
        """Waits for the oldest pending chunk and returns it; `cut` says when to end it early."""
        if self._part is None:
            return self.finished(self._env.rollout_wait(cut=cut))
        return self.finished(self._env.part_wait([self._part])[1])

    def finished(self, rollout: Rollout) -> Rollout:
        """Removes the oldest pending chunk, for which the caller has waited, counts its steps and returns it."""
        chunk = self.pending.popleft()  # after the wait: an interrupted one leaves it pending
        self.first_step += chunk.num_steps
        return rollout

    def forget(self) -> None:
        """Forgets the pending chunks, whose environments are closed."""
        self.pending.clear()
