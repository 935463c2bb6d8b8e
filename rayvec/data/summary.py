"""The result of one rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayvec.data.chunk import Chunk, ChunkRef

__all__ = ["Rollout", "RolloutTimes"]


class RolloutTimes(NamedTuple):
    """Wall time of one rollout, in seconds.

    Attributes:
        whole_s: From beginning to end.
        environment_s: The part of it spent waiting for environments.
        inference_s: The part of it spent in the policy.
    """

    whole_s: float
    environment_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """The result of one rollout.

    Attributes:
        summary: The chunk without what the policy saw and did: see :func:`rayvec.data.join_chunks.summarize`.
        chunk: The chunk, or None if it stays in Ray's object store.
        refs: If it stays there, one reference for each node.
        times: Times of each worker, or of the driver if it acted.
        waited_s: How long the caller waited, in seconds.
        num_padded: Number of places for steps that were not taken, because the chunk was cut; they are not `valid`.
    """

    summary: Chunk
    chunk: Chunk | None
    refs: tuple[ChunkRef, ...]
    times: tuple[RolloutTimes, ...]
    waited_s: float
    num_padded: int = 0
