"""What a collector returns, with statistics of its episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rayvec.data.chunk import Chunk


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """Episodes that ended, those of a chunk in the order of their last steps (t, then column).

    Attributes:
        env_ids: ``int64 [F]``.
        returns: Undiscounted sums of rewards, ``float64 [F]``.
        lens: Numbers of steps, ``int64 [F]``.
        metrics: By name, numbers in the info of the last step, ``float64 [F]``; NaN where it has none.
        num_cut: How many of them did not end, but were longer than a limit.
    """

    env_ids: NDArray[np.int64]
    returns: NDArray[np.float64]
    lens: NDArray[np.int64]
    metrics: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    num_cut: int = 0

    @property
    def return_mean(self) -> float:
        """Mean of the returns; NaN without episodes."""
        return float(self.returns.mean()) if len(self.returns) else math.nan

    @property
    def return_std(self) -> float:
        """Standard deviation of the returns over episodes; NaN without episodes."""
        return float(self.returns.std()) if len(self.returns) else math.nan


@dataclass(frozen=True, slots=True)
class CollectStats:
    """What one call of ``collect`` did.

    Attributes:
        returns: Returns of the episodes that count, ``float64 [F]``.
        lens: Their lengths in steps, ``int64 [F]``.
        n_collected_steps: Steps that the batch holds.
        n_collected_episodes: F.
        n_surplus_steps: Steps that were taken but don't belong to the batch: beyond an ``n_episode`` quota, of
            chunks that were pending when the collector was reset, or in which an environment raised.
        collect_time_s: Wall time of the call in seconds.
        steps_per_s: Steps taken per second of wall time.
        time_split_s: The same seconds, divided: ``environment`` and ``inference``, of the mean worker;
            ``waiting``, how much earlier the mean worker finishes than the slowest; ``transport``, everything else:
            requests, recording, fetching and joining. Work that was done before the call (prefetch) is left out. With
            ``inference="driver"``, ``environment`` includes the way between driver and environments.
        weights_versions: Oldest and newest version of the weights that acted.
        staleness: How many versions were published after the oldest that acted, when the batch was returned.
        n_restarts: How often an environment was restarted because it, its worker or its node had failed.
        staleness_counts: With `max_staleness`: how many columns of the chunk were 0, 1, 2, ... versions old.
        n_replaced: How many workers and nodes were replaced because they died or hung, by kind: ``worker``, ``node``.
        metrics: By name, what `episode_metrics` of the collector names in the info of each episode's last step,
            ``float64 [F]``; NaN where it has none.
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
    staleness_counts: tuple[int, ...] = ()
    n_replaced: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, NDArray[np.float64]] = field(default_factory=dict)


def metric_means(metrics: Mapping[str, Sequence[float] | NDArray[np.float64]]) -> dict[str, float]:
    """Returns the mean of each metric over the episodes that have it; metrics that none has are left out."""
    known = {name: np.asarray(values)[~np.isnan(values)] for name, values in metrics.items()}
    return {name: float(values.mean()) for name, values in known.items() if len(values)}


def join_episodes(parts: Sequence[EpisodeStats]) -> EpisodeStats:
    """Returns episodes one after another."""
    return EpisodeStats(
        np.concatenate([part.env_ids for part in parts]),
        np.concatenate([part.returns for part in parts]),
        np.concatenate([part.lens for part in parts]),
        {name: np.concatenate([part.metrics[name] for part in parts]) for name in parts[0].metrics},
        sum(part.num_cut for part in parts),
    )


def join_stats(parts: Sequence[CollectStats]) -> CollectStats:
    """Returns the statistics of collectors that collected at the same time, each from its own environments.

    The episodes are interleaved in proportion: the k-th of F episodes of a collector counts as ended after k/F of the
    time. So the last ones come from all collectors.
    """
    first, collect_time_s = parts[0], max(part.collect_time_s for part in parts)
    versions = [part.weights_versions for part in parts]

    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    ended = np.concatenate([np.arange(1, len(part.returns) + 1) / max(1, len(part.returns)) for part in parts])
    order = np.argsort(ended, kind="stable")
    return CollectStats(
        returns=np.concatenate([part.returns for part in parts])[order],
        lens=np.concatenate([part.lens for part in parts])[order],
        n_collected_steps=total("n_collected_steps"),
        n_collected_episodes=total("n_collected_episodes"),
        n_surplus_steps=total("n_surplus_steps"),
        collect_time_s=collect_time_s,
        steps_per_s=sum(part.steps_per_s * part.collect_time_s for part in parts) / collect_time_s,
        time_split_s={name: float(np.mean([part.time_split_s[name] for part in parts])) for name in first.time_split_s},
        weights_versions=(min(low for low, _ in versions), max(high for _, high in versions)),
        staleness=max(part.staleness for part in parts),
        n_restarts=total("n_restarts"),
        n_replaced=dict(sum((Counter(part.n_replaced) for part in parts), Counter())),
        metrics={name: np.concatenate([part.metrics[name] for part in parts])[order] for name in first.metrics},
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """What a collector returns: chunks in the order they were taken, and statistics.

    Attributes:
        chunks: One or more chunks of the same environments. With `max_staleness` it is one chunk, in which an
            environment has as many columns as it has chunks, in the order of time.
        stats: See :class:`CollectStats`.
    """

    chunks: tuple[Chunk, ...]
    stats: CollectStats
