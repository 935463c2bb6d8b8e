"""What the ranks of a learner have in common: one sum, and which rows a minibatch has.

Whoever computes on several ranks computes sums over all rows, scales by global counts, and lets `Ranks.sum_` add
what each rank has. Nothing here needs Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayvec.errors import ConfigError

__all__ = ["ALONE", "Alone", "ClosableRanks", "Ranks", "check_minibatch", "deal", "gather_counts", "global_moments"]


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


def deal(count: int, num_minibatches: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    """Deals the numbers from 0 to ``count - 1`` out among minibatches at random, one to each in every round.

    So neighbours, such as two steps of an episode, come into different minibatches, and sizes differ by at most one.
    Whoever holds a range of numbers holds as many of each minibatch, give or take two: no rank waits for another that
    has drawn more.

    Returns:
        The numbers of each minibatch, ascending.

    >>> deal(7, 3, np.random.default_rng(0))
    [array([1, 5]), array([2, 4]), array([0, 3, 6])]
    """
    one_round = np.arange(num_minibatches, dtype=np.min_scalar_type(num_minibatches))  # small numbers sort faster
    rounds = np.tile(one_round, (-(-count // num_minibatches), 1))
    minibatch = generator.permuted(rounds, axis=1).ravel()[:count]
    ends = np.bincount(minibatch, minlength=num_minibatches).cumsum()
    return np.split(minibatch.argsort(kind="stable"), ends[:-1])


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
            "Every rank computes on rows of each minibatch.",
            expected=f"at most {minibatch_size} ranks, as minibatch_size",
            got=f"{ranks.size} ranks",
            remedy="Lower num_learners, or raise minibatch_size",
        )
