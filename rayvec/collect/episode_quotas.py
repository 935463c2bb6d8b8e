"""Episodes that are assigned to environments before any step is taken, so that short ones are not favoured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["EPISODE_CHUNK_STEPS", "EpisodeQuotas", "episode_quotas"]

EPISODE_CHUNK_STEPS = 64
"""Steps of a chunk where episodes are counted: few, so that little is stepped beyond the last episode."""


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
        return EPISODE_CHUNK_STEPS if self._left.any() else 0

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
