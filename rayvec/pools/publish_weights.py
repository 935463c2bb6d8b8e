"""Versioned policy weights. The driver publishes them once, each node fetches them once, and workers share a copy."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rayvec.errors import ConfigError
from rayvec.pools.base import ActingPool

__all__ = ["WeightStore"]

_keys = itertools.count()


class WeightStore:
    """One policy on all nodes of a pool, and the versions of its weights.

    Args:
        pool: The pool whose workers run the policy.
        pickled: The policy, pickled.
        first_version: The version of the weights that the policy contains.
        guarded: Calls the function that it is given. If that raises, it closes the owner of the pool.
        on_node: Whether the policy acts in the processes that own the workers, and not in each worker.
        unused: Gets the key of this store when it is garbage-collected. The owner of the pool drops the policy later,
            because a finalizer may run in the middle of another call.
    """

    def __init__(
        self,
        pool: ActingPool,
        pickled: bytes,
        first_version: int = 0,
        guarded: Callable[[Callable[[], None]], None] = lambda function: function(),
        *,
        on_node: bool = False,
        unused: list[int] | None = None,
    ) -> None:
        self.key = next(_keys)
        self.version = first_version
        self._pool = pool
        self._size: int | None = None
        self._guarded = guarded
        guarded(lambda: pool.acting.load(self.key, pickled, first_version, on_node=on_node))
        self._end = weakref.finalize(self, ([] if unused is None else unused).append, self.key)
        self._end.atexit = False

    def publish(self, weights: NDArray[np.float32]) -> int:
        """Publishes a flat vector of weights, ``float32 [P]``. Every chunk requested from now on uses it.

        Returns:
            The version of these weights, one more than the last version.

        Raises:
            ConfigError: `weights` is not a flat float32 vector, or its size differs from the last one.
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
        """Removes the policy and its weights from the workers. The store can't be used afterwards."""
        self._end.detach()
        self._guarded(lambda: self._pool.acting.drop(self.key))
