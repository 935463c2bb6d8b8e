"""Weights by version: published once, fetched once by every node, read by its workers from shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from rayvec.errors import ConfigError
from rayvec.pools.base import ActingPool

__all__ = ["WeightStore"]

_keys = itertools.count()


class WeightStore:
    """One policy on all nodes of a pool, and the versions of its weights.

    Args:
        pool: Whose workers are to act.
        policy: Pickled once and sent to every worker.
        first_version: Of the weights that the policy brings along.
        guarded: Calls what it is given, and sees to it that an error closes whatever the pool belongs to.
    """

    def __init__(
        self,
        pool: ActingPool,
        policy: Any,
        first_version: int = 0,
        guarded: Callable[[Callable[[], None]], None] = lambda function: function(),
    ) -> None:
        self.key = next(_keys)
        self.version = first_version
        self._pool = pool
        self._size: int | None = None
        self._guarded = guarded
        pickled = cloudpickle.dumps(policy)
        guarded(lambda: pool.acting.load(self.key, pickled, first_version))

    def publish(self, weights: NDArray[np.float32]) -> int:
        """Publishes a flat vector of weights; every chunk that begins from now on is taken with it.

        Returns:
            Its version, one more than the last.

        Raises:
            ConfigError: It is no flat float32 vector, or has another size than the one before.
            NodeLostError: A node was lost, and may not or can't be replaced.
        """
        weights = np.ascontiguousarray(weights)
        if weights.ndim != 1 or weights.dtype != np.float32 or self._size not in (None, weights.size):
            raise ConfigError(
                "The weights of a policy are one flat vector of a size that stays.",
                expected=f"float32 [{'n' if self._size is None else self._size}]",
                got=f"{weights.dtype} {list(weights.shape)}",
                remedy="Publish what learner.weights() returns, of the module that the policy wraps.",
            )
        self._size = weights.size
        self.version += 1
        self._guarded(lambda: self._pool.acting.publish(self.key, self.version, weights))
        return self.version

    def drop(self) -> None:
        """Lets the workers forget the policy and its weights; the store can't be used after it."""
        self._guarded(lambda: self._pool.acting.drop(self.key))
