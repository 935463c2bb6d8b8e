"""What a collector returns, with statistics of its episodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayvec.data.chunk import Chunk, ChunkRef

__all__ = ["Batch", "CollectStats", "EpisodeStats"]


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """The episodes that ended, in the order of their last steps (t, then column).

    Attributes:
        env_ids: ``int64 [F]``.
        returns: Undiscounted sums of rewards, ``float64 [F]``.
        lens: Numbers of steps, ``int64 [F]``.
    """

    env_ids: NDArray[np.int64]
    returns: NDArray[np.float64]
    lens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CollectStats:
    """What one call of ``collect`` did.

    Attributes:
        returns: Returns of the episodes that count, ``float64 [F]``.
        lens: Their lengths in steps, ``int64 [F]``.
        n_collected_steps: Steps that the batch holds.
        n_collected_episodes: F.
        n_surplus_steps: Steps that were taken but don't belong to the batch: beyond an ``n_episode`` quota, of dropped
            episodes, or of chunks that were pending when the collector was reset.
        collect_time_s: Wall time of the call in seconds.
        steps_per_s: Steps taken per second of wall time.
        time_split_s: The same seconds, divided: ``environment`` and ``inference``, of the mean worker;
            ``waiting``, how much earlier the mean worker finishes than the slowest; ``transport``, everything else:
            requests, recording, fetching and joining. Work that was done before the call (prefetch) is left out. With
            ``inference="driver"``, ``environment`` includes the way between driver and environments.
        weights_versions: Oldest and newest version of the weights that acted.
        staleness: How many versions were published after the oldest that acted, when the batch was returned.
        n_restarts: How often an environment was restarted because it, its worker or its node had failed.
        n_dropped_episodes: Episodes left out because an observation was not finite.
    """

    returns: NDArray[np.float64]
    lens: NDArray[np.int64]
    n_collected_steps: int
    n_collected_episodes: int
    n_surplus_steps: int
    collect_time_s: float
    steps_per_s: float
    time_split_s: dict[str, float]
    weights_versions: tuple[int, int]
    staleness: int = 0
    n_restarts: int = 0
    n_dropped_episodes: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What a collector returns: chunks in the order they were taken, and statistics.

    Attributes:
        chunks: One or more chunks of the same environments; empty with ``by_reference=True``.
        stats: See :class:`CollectStats`.
        chunk_refs: With ``by_reference=True``, for every chunk one reference for each node, in order.
    """

    chunks: tuple[Chunk, ...]
    stats: CollectStats
    chunk_refs: tuple[tuple[ChunkRef, ...], ...] = ()
