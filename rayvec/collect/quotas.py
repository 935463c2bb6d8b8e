"""Shares of a number of episodes, which each environment gets beforehand: short episodes are not favoured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk
from rayvec.data.chunk import counted_ends

EPISODE_CHUNK_STEPS = 64
"""Steps of a chunk where episodes are counted: few, so that little is stepped beyond the last episode."""


def episode_quotas(n_episode: int, num_envs: int) -> NDArray[np.int64]:
    """Returns how many of a number of episodes each environment plays: the first ones play one more, if need be."""
    return n_episode // num_envs + (np.arange(num_envs) < n_episode % num_envs).astype(np.int64)


def within_quotas(chunk: Chunk, left: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns which steps of a chunk belong to the episodes that environments have left to play, ``bool [T, N]``.

    Args:
        chunk: The chunk.
        left: How many episodes each environment has left, ``int64 [N]``; those that end in the chunk are subtracted.
    """
    ended = counted_ends(chunk)
    ended_before: NDArray[np.int64] = np.cumsum(ended, axis=0) - ended  # when a step began
    belongs = chunk.valid & (ended_before < left)
    left -= np.minimum(ended.sum(0), left)
    return belongs
