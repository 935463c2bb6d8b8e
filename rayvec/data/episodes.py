"""Returns and lengths of episodes, summed from chunk to chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, EpisodeStats
from rayvec.data.chunk import counted_ends


def _numbers_at(chunk: Chunk, at: NDArray[np.int64], names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Returns what the infos at some places ``[F, 2]`` have under each name; NaN for what is no number."""
    found = {name: np.full(len(at), np.nan) for name in names}
    row_of = {place: row for row, place in enumerate(map(tuple, at.tolist()))}
    for t, n, info in chunk.infos.where(lambda t, n: np.isin(t * chunk.rew.shape[1] + n, at @ (chunk.rew.shape[1], 1))):
        for name in info.keys() & found.keys():
            with contextlib.suppress(TypeError, ValueError):  # text, or an array of several numbers
                found[name][row_of[t, n]] = info[name]
    return found


def add_rewards(
    chunk: Chunk, sums: NDArray[np.float64], nums: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Adds rewards and steps of a chunk to those of the unfinished episodes, in the order of steps, in place.

    An episode that a fault cuts in the middle of the chunk ends like others; what a fault has ended before the chunk's
    first step is still in the sums.

    Args:
        chunk: The chunk.
        sums: The rewards of each environment's unfinished episode, ``float64 [N]``.
        nums: The steps of it, ``int64 [N]``.

    Returns:
        The return and the length of each episode where it ends, ``[T, N]``; 0 elsewhere.
    """
    rew = np.where(chunk.valid, chunk.rew, 0.0)
    returns, lens = np.zeros(rew.shape), np.zeros(rew.shape, np.int64)
    ends = chunk.done & chunk.valid
    with_ends = set(np.flatnonzero(ends.any(1)).tolist())
    for t in range(chunk.num_steps):
        sums += rew[t]
        nums += chunk.valid[t]
        if t in with_ends:
            ended = np.flatnonzero(ends[t])
            returns[t, ended], lens[t, ended] = sums[ended], nums[ended]
            sums[ended] = nums[ended] = 0
    return returns, lens


class EpisodeTracker:
    """Sums rewards and steps of episodes that may span several chunks.

    Args:
        num_envs: How many environments.
        metrics: Names of numbers in the info of an episode's last step, of which statistics are kept.

    Attributes:
        lens: Number of steps of each environment's unfinished episode, ``int64 [N]``; do not modify it.
    """

    def __init__(self, num_envs: int, metrics: Sequence[str] = ()) -> None:
        self._metrics = metrics
        self._returns = np.zeros(num_envs)
        self.lens = np.zeros(num_envs, np.int64)

    def add(
        self,
        chunk: Chunk,
        envs: NDArray[np.int64] | slice = slice(None),
        counted: NDArray[np.bool_] | bool = True,
    ) -> EpisodeStats:
        """Adds a chunk. An episode that a fault has cut is dropped from the sums: it did not end.

        Args:
            chunk: Steps of the environments.
            envs: Index of the environment in each column, ``int64 [N]``; by default it is the column's.
            counted: Of which steps an end counts, ``bool [T, N]``; by default of all.

        Returns:
            The episodes that ended in it and count.
        """
        sums, nums = self._returns[envs], self.lens[envs]
        cut_before = chunk.restarts[chunk.restarts[:, 0] <= 0, 1]
        sums[cut_before] = nums[cut_before] = 0
        returns, lens = add_rewards(chunk, sums, nums)
        self._returns[envs], self.lens[envs] = sums, nums
        ends = counted_ends(chunk) & counted
        at = np.argwhere(ends)
        metrics = _numbers_at(chunk, at, self._metrics) if self._metrics else {}
        return EpisodeStats(chunk.env_ids[at[:, 1]], returns[ends], lens[ends], metrics)

    def cut(self, envs: NDArray[np.int64], env_ids: NDArray[np.int64]) -> EpisodeStats:
        """Returns the unfinished episodes of some environments as if they had ended, and drops them from the sums.

        Args:
            envs: Indices of the environments, ``int64 [F]``.
            env_ids: Their global indices, ``int64 [F]``.
        """
        missing = {name: np.full(len(envs), np.nan) for name in self._metrics}
        stats = EpisodeStats(env_ids, self._returns[envs], self.lens[envs], missing, len(envs))
        self._returns[envs] = self.lens[envs] = 0
        return stats

    def clear(self) -> None:
        """Drops the unfinished episodes: every environment begins a new one."""
        self._returns[:] = 0.0
        self.lens[:] = 0

    def state(self) -> tuple[list[Any], ...]:
        """Returns the sums of each environment's unfinished episode, for :meth:`load`."""
        return tuple(sums.tolist() for sums in (self._returns, self.lens))

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Continues with the sums that :meth:`state` has returned."""
        self._returns[:], self.lens[:] = state
