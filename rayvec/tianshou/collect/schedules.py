"""Which steps of the chunks a call of a Tianshou collector requested."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayvec.collect.episode_quotas import EPISODE_CHUNK_STEPS

__all__ = ["StepCount", "TianshouEpisodes"]

_MAX_STEPS = 128
"""Steps of a chunk where their number is known beforehand; it bounds the memory that chunks take."""


class StepCount:
    """A number of steps in all, the same for every environment, and so rounded up.

    Args:
        n_step: Steps in all.
        num_envs: How many environments.

    Attributes:
        left: How many steps each environment has to take.
    """

    def __init__(self, n_step: int, num_envs: int) -> None:
        self.left = -(-n_step // num_envs)

    def next_steps(self) -> int:
        """Returns how many steps the next chunk has; 0 once everything has been taken."""
        return max(0, min(self.left, _MAX_STEPS))

    def take(self, valid: NDArray[np.bool_], ended: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns which steps of a chunk were requested; see :meth:`EpisodeQuotas.take`."""
        self.left -= len(valid)
        return valid


class TianshouEpisodes:
    """A number of episodes, by the rule of Tianshou's Collector.

    No more environments take part than there are episodes to collect. When fewer episodes are left than
    environments take part, the first of those that have just ended one leave, so short episodes come more often.
    """

    def __init__(self, n_episode: int, num_envs: int) -> None:
        self._left = n_episode
        self._takes_part = np.arange(num_envs) < n_episode

    def next_steps(self) -> int:
        """Returns how many steps the next chunk has; 0 once everything has been taken."""
        return EPISODE_CHUNK_STEPS if self._left > 0 else 0

    def take(self, valid: NDArray[np.bool_], ended: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns which steps of a chunk were requested; see :meth:`EpisodeQuotas.take`."""
        belongs = valid & self._takes_part
        for t in np.flatnonzero(ended.any(1)).tolist():
            columns = np.flatnonzero(ended[t] & self._takes_part)
            self._left -= len(columns)
            leaving = columns[: max(0, int(self._takes_part.sum()) - self._left)]
            self._takes_part[leaving] = False
            belongs[t + 1 :, leaving] = False
        return belongs
