"""What the ranks of a learner have in common: one sum.

Whoever computes on several ranks computes sums over all rows, scales by global counts, and lets `Ranks.sum_` add
what each rank has. Nothing here needs Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rayvec.errors import ConfigError, message

__all__ = ["ALONE", "Alone", "ClosableRanks", "Ranks", "check_minibatch", "gather_counts", "global_moments"]


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
            RankLostError: A rank is gone or did not come in time.
        """
        ...


class ClosableRanks(Ranks, Protocol):
    """Ranks that a rank can leave."""

    def close(self) -> None:
        """Gives up: whoever waits for this rank is told so, soon or by its timeout. May be called again."""


class Alone:
    """The only rank: a sum over all ranks is what it has already."""

    rank = 0
    size = 1

    def sum_(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`."""
        return tensor

    def close(self) -> None:
        """Nobody waits."""


ALONE = Alone()


def gather_counts(ranks: Ranks, count: int) -> list[int]:
    """Returns the `count` of every rank, in the order of ranks."""
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = count
    return [int(each) for each in ranks.sum_(counts)]


def global_moments(ranks: Ranks, samples: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of each of K samples that are spread over the ranks, ``float64 [K]`` each.

    Args:
        ranks: Who holds the samples together.
        samples: What this rank holds of each, of any length, also none.
        counts: How many numbers each sample has on all ranks together.

    >>> global_moments(ALONE, [torch.tensor([1.0, 3.0])], [2])
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    sums = torch.stack([sample.sum(dtype=torch.float64) for sample in samples])
    divisors = sums.new_tensor(counts).clamp(min=1)
    mean = ranks.sum_(sums) / divisors
    squares = [(sample.double() - centre).square().sum() for sample, centre in zip(samples, mean, strict=True)]
    return mean, ranks.sum_(torch.stack(squares)) / divisors


def check_minibatch(ranks: Ranks, minibatch_size: int) -> None:
    """Refuses more ranks than a minibatch has rows.

    Raises:
        ConfigError: There are more.
    """
    if ranks.size > minibatch_size:
        raise ConfigError(
            message(
                "Every rank computes on rows of each minibatch.",
                expected=f"at most {minibatch_size} ranks, as minibatch_size",
                got=f"{ranks.size} ranks",
                remedy="Lower num_learners, or raise minibatch_size",
            )
        )
