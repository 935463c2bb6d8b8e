"""What is known of a chunk without its contents, and of the rollout that it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data.chunk import Chunk, ChunkRef
from rayvec.data.trees import Tree

__all__ = ["BadObs", "ChunkSummary", "Rollout", "RolloutTimes"]


class BadObs(NamedTuple):
    """Where observations of a chunk are NaN or infinite.

    Attributes:
        where: ``bool [T + 1, N]``: row t is `obs` at t, row T is `last_obs`.
        finals: Of `final_obs`, ``bool [F]``.
        first: The first of them, for a person: what it is, its key, step and environment.
    """

    where: NDArray[np.bool_]
    finals: NDArray[np.bool_]
    first: str


@dataclass(frozen=True, slots=True)
class ChunkSummary:
    """What must be known of a chunk to tell its episodes apart, without what the policy saw and did.

    Attributes:
        env_ids: As of the chunk, like everything that has the same name there.
        rew: ``float64 [T, N]``.
        terminated: ``bool [T, N]``.
        truncated: ``bool [T, N]``.
        valid: ``bool [T, N]``.
        final_index: ``int64 [F, 2]``.
        restarts: ``int64 [R, 2]``.
        cuts: ``int64 [C, 2]``.
        last_obs: Tree of ``[N, *obs_shape]``, for whoever must go on where a node is lost.
        weights_version: Version of the policy's weights.
        first_step: How many steps the environments had taken in chunks before this one.
        bad_obs: Where observations are not finite; None if all are.
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
    bad_obs: BadObs | None = None

    @property
    def num_steps(self) -> int:
        """T."""
        return int(self.rew.shape[0])


class RolloutTimes(NamedTuple):
    """Wall time of one rollout, in seconds.

    Attributes:
        whole_s: From its beginning to its end.
        environment_s: Of it, until environments had answered.
        inference_s: Of it, until the policy had chosen.
    """

    whole_s: float
    environment_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """A chunk as those who acted hand it over.

    Attributes:
        summary: Of the chunk.
        chunk: The chunk, or None where it was left in Ray's object store.
        refs: Where it lies there, a part for each node; else none.
        times: Of each worker, or of the driver if it acted.
        waited_s: How long the caller waited for them, in seconds.
    """

    summary: ChunkSummary
    chunk: Chunk | None
    refs: tuple[ChunkRef, ...]
    times: tuple[RolloutTimes, ...]
    waited_s: float
