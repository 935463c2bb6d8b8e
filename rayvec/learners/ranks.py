"""What the ranks of a learner share: a sum, and the counts and moments that it gives.

A learner on several ranks computes sums over its samples, scales them by global counts, and adds up those of all ranks
by `Ranks.sum_`. Nothing here needs Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "ALONE",
    "Alone",
    "ClosableRanks",
    "Ranks",
    "first_bad_reward",
    "gather_counts",
    "gather_values",
    "global_moments",
    "global_range",
]


class Ranks(Protocol):
    """The ranks that compute one update together, as one of them sees them.

    Attributes:
        rank: Number of this rank, from 0.
        size: Number of ranks.
    """

    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over all ranks, with the same bits on each; returns it.

        Every rank calls it equally often, with tensors of the same shape and dtype, also a rank without samples.

        Raises:
            RankLostError: A rank exited, or did not call it in time.
        """
        ...


class ClosableRanks(Ranks, Protocol):
    """Ranks that a rank can leave."""

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent over the network in sums so far; 0 where ranks share memory."""
        ...

    def close(self) -> None:
        """Leaves: ranks that wait for this one raise, soon or by their timeout. May be called again."""


class Alone:
    """The only rank: the sum of a tensor over all ranks is that tensor."""

    rank = 0
    size = 1
    sent_bytes = 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`."""
        return tensor

    def close(self) -> None:
        """Does nothing: no other rank waits."""


ALONE = Alone()


def gather_counts(ranks: Ranks, count: int) -> list[int]:
    """Returns the `count` of every rank, in the order of ranks."""
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = count
    return [int(each) for each in ranks.sum_(counts)]


def first_bad_reward(ranks: Ranks, bad: tuple[int, int, float] | None) -> str | None:
    """Describes a reward that is not finite, the same one on all ranks; None if no rank has found one.

    Args:
        ranks: The ranks, which all call this.
        bad: The first one that this rank has found: its environment, its step of the batch, and the reward.
    """
    found = torch.zeros(ranks.size, 4, dtype=torch.float64)
    if bad is not None:
        found[ranks.rank] = torch.tensor([1, *bad], dtype=torch.float64)
    for is_bad, env_id, step, reward in ranks.sum_(found).tolist():
        if is_bad:
            return f"{reward} from environment {env_id:.0f} at step {step:.0f} of the batch"
    return None


def global_range(ranks: Ranks, count: int) -> tuple[range, int]:
    """Returns the numbers of this rank's `count` items, where all ranks number theirs one after another, and the total.

    >>> global_range(ALONE, 3)
    (range(0, 3), 3)
    """
    counts = gather_counts(ranks, count)
    first = sum(counts[: ranks.rank])
    return range(first, first + count), sum(counts)


def gather_values(ranks: Ranks, values: NDArray[Any]) -> NDArray[Any]:
    """Returns the values ``[n]`` of all ranks one after another; each has any number of them."""
    rows, total = global_range(ranks, len(values))
    gathered = np.zeros(total, values.dtype)
    gathered[rows.start : rows.stop] = values
    return ranks.sum_(torch.from_numpy(gathered)).numpy()


def global_moments(
    ranks: Ranks, samples: Sequence[Tensor], counts: Sequence[int], own_counts: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of each of K samples that are spread over the ranks, ``float64 [K]`` each.

    Each rank computes the moments of its part. One sum over the ranks gathers them, and all ranks merge them alike
    (Chan, Golub and LeVeque, 1979, equations 2.1), so that no digits are lost where the mean is large.

    Args:
        ranks: The ranks that hold the samples.
        samples: What this rank holds of each, of any length, also none; a matrix is one sample for each row.
        counts: Number of values of each sample on all ranks together.
        own_counts: Number of values of each sample on this rank, the first ones; by default all.

    >>> global_moments(ALONE, [torch.tensor([1.0, 3.0])], [2])
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    rows = [(sample[None] if sample.ndim == 1 else sample).double() for sample in samples]
    lengths = [each.shape[1] for each in rows for _ in each] if own_counts is None else own_counts
    own_count = torch.split(rows[0].new_tensor(lengths), [len(each) for each in rows])
    own = torch.cat([_moments(*each) for each in zip(rows, own_count, strict=True)], 1)
    of_all = own.new_zeros(ranks.size, *own.shape)
    of_all[ranks.rank] = own
    count, means, squares = ranks.sum_(of_all).unbind(1)
    total = own.new_tensor(counts).clamp(min=1)
    mean = (count * means).sum(0) / total
    return mean, (squares + count * (means - mean).square()).sum(0) / total


def _moments(rows: Tensor, count: Tensor) -> Tensor:
    """Returns count, mean and sum of squared deviations of the first `count` values of each row, ``[3, k]``."""
    is_beyond = torch.arange(rows.shape[1], device=rows.device) >= count[:, None]
    mean = rows.masked_fill(is_beyond, 0.0).sum(1) / count.clamp(min=1)
    deviations = (rows - mean[:, None]).masked_fill(is_beyond, 0.0)
    return torch.stack([count, mean, deviations.square().sum(1)])
