"""A chunk without what the policy saw and did, and the result of one rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data.chunk import Chunk, ChunkRef
from rayvec.data.infos import ChunkInfos
from rayvec.data.trees import Tree

__all__ = ["ChunkSummary", "Rollout", "RolloutTimes"]


@dataclass(frozen=True, slots=True)
class ChunkSummary:
    """The fields of a chunk that its episodes follow from, without what the policy saw and did.

    Attributes:
        env_ids: As of the chunk, like everything that has the same name there.
        rew: ``float64 [T, N]``.
        terminated: ``bool [T, N]``.
        truncated: ``bool [T, N]``.
        valid: ``bool [T, N]``.
        final_index: ``int64 [F, 2]``.
        restarts: ``int64 [R, 2]``.
        cuts: ``int64 [C, 2]``.
        infos: Those of the steps that end an episode.
        last_obs: Tree of ``[N, *obs_shape]``; if a node is lost, its episodes end at these observations.
        weights_version: Version of the policy's weights.
        first_step: Number of steps that the environments took in earlier chunks.
        bad_obs: Describes the first observation or reward that is not finite; None if all are.
    """

    env_ids: NDArray[np.int64]
    rew: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    final_index: NDArray[np.int64]
    restarts: NDArray[np.int64]
    cuts: NDArray[np.int64]
    last_obs: Tree
    weights_version: int
    first_step: int
    bad_obs: str | None = None
    infos: ChunkInfos = field(default_factory=ChunkInfos)

    @property
    def num_steps(self) -> int:
        """T."""
        return int(self.rew.shape[0])


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
        summary: Summary of the chunk.
        chunk: The chunk, or None if it stays in Ray's object store.
        refs: If it stays there, one reference for each node.
        times: Times of each worker, or of the driver if it acted.
        waited_s: How long the caller waited, in seconds.
        num_padded: Number of places for steps that were not taken, because the chunk was cut; they are not `valid`.
    """

    summary: ChunkSummary
    chunk: Chunk | None
    refs: tuple[ChunkRef, ...]
    times: tuple[RolloutTimes, ...]
    waited_s: float
    num_padded: int = 0
