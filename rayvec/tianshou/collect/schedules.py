"""Which steps of the chunks belong to what a Tianshou collector was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk

__all__ = ["EpisodeQuotas", "Schedule", "StepCount", "TianshouEpisodes"]

_MOST_STEPS = 128
"""Steps of a chunk where their number is known beforehand; what bounds the memory that chunks take."""
_EPISODE_STEPS = 64
"""Where episodes are counted, so that little is stepped beyond the last."""


class Schedule(Protocol):
    """Says how many steps to take next, and takes from a chunk what was asked for."""

    def next_steps(self) -> int:
        """Returns how many steps the next chunk has; 0 if all has been taken."""
        ...

    def take(self, chunk: Chunk, ended: NDArray[np.bool_]) -> Chunk:
        """Returns the chunk with `valid` cleared where a step does not belong.

        Args:
            chunk: The next.
            ended: Where episodes ended that count, ``bool [T, N]``.
        """
        ...


class StepCount:
    """A number of steps in all, the same for every environment, and so rounded up."""

    def __init__(self, n_step: int, num_envs: int) -> None:
        self._left = -(-n_step // num_envs)

    def next_steps(self) -> int:
        """See :class:`Schedule`."""
        return max(0, min(self._left, _MOST_STEPS))

    def take(self, chunk: Chunk, ended: NDArray[np.bool_]) -> Chunk:
        """See :class:`Schedule`."""
        self._left -= chunk.num_steps
        return chunk


class TianshouEpisodes:
    """A number of episodes, by the rule of Tianshou's Collector.

    No more environments take part than there are episodes to collect. When there are fewer episodes left than
    environments, the first of those that have just ended one leave, so that short episodes come more often.
    """

    def __init__(self, n_episode: int, num_envs: int) -> None:
        self._left = n_episode
        self._takes_part = np.arange(num_envs) < n_episode

    def next_steps(self) -> int:
        """See :class:`Schedule`."""
        return _EPISODE_STEPS if self._left > 0 else 0

    def take(self, chunk: Chunk, ended: NDArray[np.bool_]) -> Chunk:
        """See :class:`Schedule`."""
        valid = chunk.valid & self._takes_part
        for t in np.flatnonzero(ended.any(1)).tolist():
            columns = np.flatnonzero(ended[t] & self._takes_part)
            if not len(columns):
                continue
            self._left -= len(columns)
            surplus = int(self._takes_part.sum()) - self._left
            if surplus > 0:
                leave = columns[:surplus]
                self._takes_part[leave] = False
                valid[t + 1 :, leave] = False
            if self._left <= 0:
                valid[t + 1 :] = False
                break
        return replace(chunk, valid=valid)


class EpisodeQuotas:
    """A number of episodes, of which every environment is given its share beforehand: none is favoured."""

    def __init__(self, n_episode: int, num_envs: int) -> None:
        self._left = n_episode // num_envs + (np.arange(num_envs) < n_episode % num_envs).astype(np.int64)

    def next_steps(self) -> int:
        """See :class:`Schedule`."""
        return _EPISODE_STEPS if self._left.any() else 0

    def take(self, chunk: Chunk, ended: NDArray[np.bool_]) -> Chunk:
        """See :class:`Schedule`."""
        before: NDArray[np.int64] = np.cumsum(ended, axis=0) - ended  # episodes that had ended when a step began
        valid = chunk.valid & (before < self._left)
        self._left = np.maximum(self._left - ended.sum(0), 0)
        return replace(chunk, valid=valid)
