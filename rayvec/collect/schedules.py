"""Which steps of chunks a call of a collector asks for: a number of steps, or of episodes by one of two rules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_EPISODE_CHUNK_STEPS = 64
"""Steps of a chunk where episodes are counted: few, so that little is stepped beyond the last episode."""
_MAX_STEPS = 128
"""Steps of a chunk where their number is known beforehand; it bounds the memory that chunks take."""


def episode_quotas(n_episode: int, num_envs: int) -> NDArray[np.int64]:
    """Returns how many of a number of episodes each environment plays: the first ones play one more, if need be."""
    return n_episode // num_envs + (np.arange(num_envs) < n_episode % num_envs).astype(np.int64)


class EpisodeQuotas:
    """Gives each environment its share of a number of episodes beforehand.

    Args:
        n_episode: Episodes in all; see :func:`episode_quotas`.
        num_envs: N.
    """

    def __init__(self, n_episode: int, num_envs: int) -> None:
        self._left = episode_quotas(n_episode, num_envs)

    @property
    def unfinished(self) -> NDArray[np.bool_]:
        """Which environments have not ended their episodes, ``bool [N]``."""
        return self._left > 0

    def next_steps(self) -> int:
        """Returns how many steps the next chunk has; 0 once every environment has ended its episodes."""
        return _EPISODE_CHUNK_STEPS if self._left.any() else 0

    def cut(self, ended: NDArray[np.bool_]) -> None:
        """Counts one episode more of some environments, ``bool [N]``."""
        self._left = np.maximum(self._left - ended, 0)

    def take(self, valid: NDArray[np.bool_], ended: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns which steps of a chunk belong to the episodes that were assigned.

        Args:
            valid: Steps that happened, ``bool [T, N]``.
            ended: Steps that ended an episode that counts, ``bool [T, N]``.
        """
        before: NDArray[np.int64] = np.cumsum(ended, axis=0) - ended  # episodes that had ended when a step began
        belongs = valid & (before < self._left)
        self._left = np.maximum(self._left - ended.sum(0), 0)
        return belongs


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
        return _EPISODE_CHUNK_STEPS if self._left > 0 else 0

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
