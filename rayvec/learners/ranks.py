"""Communication between the ranks of a learner, and how they divide minibatches.

A learner on several ranks computes sums over its samples, scales them by global counts, and adds up those of all ranks
by `Ranks.all_reduce_`. Nothing here needs Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ranks(Protocol):
    """The ranks that compute one update together, as one of them sees them.

    Attributes:
        rank: Number of this rank, from 0.
        size: Number of ranks.
    """

    rank: int
    size: int

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over all ranks, with the same bits on each; returns it.

        Every rank calls it equally often, with tensors of the same shape and dtype, also a rank without samples.

        Raises:
            RankLostError: A rank exited, or did not call it in time.
        """
        ...

    def close(self) -> None:
        """Leaves: ranks that wait for this one raise, soon or by their timeout. May be called again."""


class Alone:
    """The only rank: the sum of a tensor over all ranks is that tensor."""

    rank = 0
    size = 1

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`."""
        return tensor

    def close(self) -> None:
        """Does nothing: no other rank waits."""


ALONE = Alone()


def global_range(ranks: Ranks, count: int) -> tuple[range, int]:
    """Returns the numbers of this rank's `count` items, where all ranks number theirs one after another, and the total.

    >>> global_range(ALONE, 3)
    (range(0, 3), 3)
    """
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = count
    ends = ranks.all_reduce_(counts).cumsum(0).tolist()
    return range(ends[ranks.rank] - count, ends[ranks.rank]), ends[-1]


def gather_values(ranks: Ranks, values: NDArray[Any]) -> NDArray[Any]:
    """Returns the values ``[n]`` of all ranks one after another; each has any number of them."""
    rows, total = global_range(ranks, len(values))
    gathered = np.zeros(total, values.dtype)
    gathered[rows.start : rows.stop] = values
    return ranks.all_reduce_(torch.from_numpy(gathered)).numpy()


def global_moments(ranks: Ranks, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of each of K samples that are spread over the ranks, ``float64 [K]`` each.

    Each rank computes the moments of its part. One sum over the ranks gathers them, and all ranks merge them alike
    (Chan, Golub and LeVeque, 1979, equations 2.1), so that no digits are lost where the mean is large.

    Args:
        ranks: The ranks that hold the samples.
        rows: What this rank holds of each, padded, ``[K, L]``.
        counts: How many values of each row count, the first ones.

    >>> global_moments(ALONE, torch.tensor([[1.0, 3.0]]), [2])
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    rows = rows.double()
    count = rows.new_tensor(counts)
    is_beyond = torch.arange(rows.shape[1], device=rows.device) >= count[:, None]
    mean = rows.masked_fill(is_beyond, 0.0).sum(1) / count.clamp(min=1)
    deviations = (rows - mean[:, None]).masked_fill(is_beyond, 0.0)
    of_all = rows.new_zeros(ranks.size, 3, len(rows))
    of_all[ranks.rank] = torch.stack([count, mean, deviations.square().sum(1)])
    every_count, means, squares = ranks.all_reduce_(of_all).unbind(1)
    total = every_count.sum(0).clamp(min=1)
    mean = (every_count * means).sum(0) / total
    return mean, (squares + every_count * (means - mean).square()).sum(0) / total


def stratified_shuffle(count: int, num_minibatches: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    """Shuffles the numbers from 0 to ``count - 1`` into minibatches, one of each stratum into each minibatch.

    A stratum is as many consecutive numbers as there are minibatches. So neighbours, such as two steps of an episode,
    come into different minibatches, and sizes differ by at most one. A rank that holds a range of numbers holds as many
    of each minibatch, give or take two: no rank waits for another that has drawn more.

    Returns:
        The numbers of each minibatch, ascending.

    >>> stratified_shuffle(7, 3, np.random.default_rng(0))
    [array([1, 5]), array([2, 4]), array([0, 3, 6])]
    """
    stratum = np.arange(num_minibatches, dtype=np.min_scalar_type(num_minibatches))  # small numbers sort faster
    strata = np.tile(stratum, (-(-count // num_minibatches), 1))
    minibatch = generator.permuted(strata, axis=1).ravel()[:count]
    ends = np.bincount(minibatch, minlength=num_minibatches).cumsum()
    return np.split(minibatch.argsort(kind="stable"), ends[:-1])


def own_part(numbers: NDArray[np.int64], own: range) -> NDArray[np.int64]:
    """Returns those of the ascending `numbers` that are in `own`, counted from its start.

    >>> own_part(np.array([1, 4, 6]), range(4, 8))
    array([0, 2])
    """
    return numbers[slice(*numbers.searchsorted([own.start, own.stop]))] - own.start
