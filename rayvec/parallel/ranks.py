"""What the ranks of a learner have in common: one sum.

Whoever computes on several ranks computes sums over all rows, scales by global counts, and lets `Ranks.sum_` add
what each rank has. Nothing here needs Ray.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ALONE", "Alone", "Ranks", "gather_counts"]


class Ranks(Protocol):
    """The ranks that compute one update together, as one of them sees them.

    Attributes:
        rank: Number of this rank, from 0.
        size: How many there are.
    """

    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over all ranks, with the same bits on each; returns it.

        Every rank calls it equally often, with tensors of the same shape and dtype, also a rank that has no rows.

        Raises:
            LearnerError: A rank is gone or did not come in time.
        """
        ...


class Alone:
    """The only rank: a sum over all ranks is what it has already."""

    rank = 0
    size = 1

    def sum_(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`."""
        return tensor


ALONE = Alone()


def gather_counts(ranks: Ranks, count: int) -> list[int]:
    """Returns the `count` of every rank, in the order of ranks."""
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = count
    return [int(each) for each in ranks.sum_(counts)]
