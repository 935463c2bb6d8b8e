"""What the driver sends to the ranks of a data-parallel algorithm: rows, and their surroundings in the buffer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tianshou.data import Batch, ReplayBuffer

from rayvec.data.partition import even_bounds
from rayvec.tianshou.learn.algorithm_state import Numbers

__all__ = [
    "Ahead",
    "AheadView",
    "Generators",
    "OffPolicyUpdate",
    "OnPolicyUpdate",
    "Shard",
    "WholeView",
    "cut_batch",
    "writable",
]


@dataclass(frozen=True)
class Generators:
    """The states of NumPy's and torch's global generators, which Tianshou draws permutations and noise from.

    Attributes:
        numpy: State from ``numpy.random.get_state``.
        torch: State from ``torch.get_rng_state``, uint8.
        cuda_seed: Seed of the generators of GPUs, whose states are of another kind.
    """

    numpy: Any
    torch: NDArray[np.uint8]
    cuda_seed: int | None = None

    @classmethod
    def capture(cls, cuda_seed: int | None = None) -> Generators:
        """Returns their states as they are now."""
        return cls(np.random.get_state(), torch.get_rng_state().numpy(), cuda_seed)

    def restore(self, *, numpy_alone: bool = False) -> None:
        """Puts the generators of this process into these states."""
        np.random.set_state(self.numpy)
        if not numpy_alone:
            torch.set_rng_state(torch.from_numpy(self.torch.copy()))
        if self.cuda_seed is not None and torch.cuda.is_available():
            torch.cuda.manual_seed_all(self.cuda_seed)


@dataclass(frozen=True)
class OnPolicyUpdate:
    """What every rank knows of an on-policy update of a batch of ``n`` rows.

    Attributes:
        numbers: Numbers of the driver's algorithm, see
            :class:`rayvec.tianshou.learn.algorithm_state.AlgorithmState`.
        generators: Generators of the driver.
        rew: Rewards, ``[n]``.
        terminated: ``[n]`` bool.
        truncated: ``[n]`` bool.
        is_last: Where an environment's steps in the buffer end, ``[n]`` bool.
        batch_size: Rows of a minibatch; None: all.
        repeat: Number of passes over the batch.
    """

    numbers: Numbers
    generators: Generators
    rew: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    is_last: NDArray[np.bool_]
    batch_size: int | None
    repeat: int

    @property
    def total(self) -> int:
        """Rows of the batch on all ranks."""
        return len(self.rew)

    def rows(self) -> Any:
        """Returns what returns and advantages depend on beside values, of all rows."""
        return Batch(rew=self.rew, terminated=self.terminated, truncated=self.truncated, is_last=self.is_last)


@dataclass(frozen=True)
class OffPolicyUpdate:
    """What every rank knows of an off-policy update of a sampled batch.

    Attributes:
        numbers: Numbers of the driver's algorithm.
        generators: Generators of the driver.
        total: Rows of the batch on all ranks.
        with_weight: Whether the buffer takes new priorities.
    """

    numbers: Numbers
    generators: Generators
    total: int
    with_weight: bool


@dataclass(frozen=True)
class Ahead:
    """The steps that follow ``n`` sampled rows, for n-step returns.

    Attributes:
        rew: Rewards of each row and the N - 1 steps after it, ``[N, n]``.
        end: Where an episode ends, or is not finished yet, ``[N, n]`` bool.
        terminated: Whether the last of the N steps terminated, ``[n]`` bool.
        obs_next: Observation after the last of the N steps, ``n`` rows; None: that of the rows themselves (N = 1).
    """

    rew: NDArray[Any]
    end: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    obs_next: Any

    @classmethod
    def of(cls, buffer: ReplayBuffer, indices: NDArray[np.int64], num_steps: int) -> Ahead:
        """Looks up what follows the rows at `indices` of a buffer."""
        steps = [indices]
        for _ in range(num_steps - 1):
            steps.append(buffer.next(steps[-1]))
        end = buffer.done.copy()
        end[buffer.unfinished_index()] = True
        stacked, last = np.stack(steps), steps[-1]
        obs_next = buffer[last].obs_next if num_steps > 1 else None
        return cls(buffer.rew[stacked], end[stacked], buffer.terminated[last], obs_next)

    def cut(self, rows: slice) -> Ahead:
        """Returns the part of some rows."""
        return Ahead(
            self.rew[:, rows],
            self.end[:, rows],
            self.terminated[rows],
            None if self.obs_next is None else self.obs_next[rows],
        )


@dataclass(frozen=True)
class Shard:
    """The rows of one rank: a contiguous part of the batch.

    Attributes:
        start: First of them in the batch.
        stop: The one after the last; equal to `start` on a rank without rows, which computes the first with share 0.
        batch: The rows, at least one.
        ahead: The steps that follow these rows, off-policy.
    """

    start: int
    stop: int
    batch: Batch
    ahead: Ahead | None = None


def cut_batch(batch: Batch, num_ranks: int, ahead: Ahead | None = None) -> list[Shard]:
    """Cuts a batch into one shard for each rank; they differ by one row at most."""
    shards = []
    for start, stop in pairwise(even_bounds(len(batch), num_ranks)):
        rows = slice(start, stop) if stop > start else slice(0, 1)
        shards.append(Shard(start, stop, batch[rows], None if ahead is None else ahead.cut(rows)))
    return shards


class WholeView:
    """The part of a buffer's interface that on-policy algorithms read, over a whole batch in its order.

    Attributes:
        terminated: ``[n]`` bool.
        last_index: The rows where an environment's steps in the buffer end.
    """

    def __init__(self, update: OnPolicyUpdate) -> None:
        self.terminated = update.terminated
        self.last_index = np.flatnonzero(update.is_last)
        self._unfinished = np.flatnonzero(update.is_last & ~(update.terminated | update.truncated))

    def unfinished_index(self) -> NDArray[np.int64]:
        """Returns the rows of `last_index` whose episode is unfinished."""
        return self._unfinished


class AheadView:
    """The part of a buffer's interface that Tianshou's n-step returns read, over the rows of one shard.

    Row i of step k is at ``k * n + i``.
    """

    def __init__(self, shard: Shard) -> None:
        assert shard.ahead is not None
        ahead = shard.ahead
        steps, self._rows = ahead.rew.shape[:2]
        self.rew = ahead.rew.reshape(steps * self._rows, *ahead.rew.shape[2:])
        self.done = ahead.end.reshape(-1)
        self._last = (steps - 1) * self._rows
        self.terminated = np.zeros(len(self.done), bool)
        self.terminated[self._last :] = ahead.terminated
        self._obs_next = shard.batch.obs_next if ahead.obs_next is None else ahead.obs_next

    def next(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the indices of the following steps."""
        following: NDArray[np.int64] = index + self._rows
        return following

    def unfinished_index(self) -> NDArray[np.int64]:
        """Returns nothing: unfinished episodes count as ended in `done` already."""
        return np.zeros(0, np.int64)

    def __getitem__(self, index: NDArray[np.int64]) -> Batch:
        return Batch(obs_next=self._obs_next[index - self._last])


def writable(batch: Batch) -> Batch:
    """Returns a batch with arrays of its own: those that come from Ray can't be written."""
    return batch.apply_values_transform(lambda value: value.copy() if isinstance(value, np.ndarray) else value)
