"""Which samples of a batch are in which minibatch, and which of these are on which rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayvec.errors import ConfigError
from rayvec.learners.ranks import Ranks

__all__ = ["check_minibatch", "own_part", "stratified_shuffle"]


def check_minibatch(ranks: Ranks, minibatch_size: int) -> None:
    """Raises a ConfigError where there are more ranks than samples in a minibatch."""
    if ranks.size > minibatch_size:
        raise ConfigError(
            f"{ranks.size} ranks can't share a minibatch of {minibatch_size} samples. Lower num_learners, or "
            "raise minibatch_size."
        )


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
