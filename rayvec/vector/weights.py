"""Versioned weights of a policy that acts where the environments are."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rayvec.errors import ConfigError
from rayvec.vector.chunks import Chunks

__all__ = ["WeightStore"]

_keys = itertools.count()


class WeightStore:
    """One policy that was sent to the environments, and the newest version of its weights.

    Args:
        chunks: The chunks of the environments.
        pickled: The policy, pickled.
        first_version: The version of the weights that the policy contains.
        guarded: Calls the function that it is given. If that raises, it closes the environments.
        on_node: Whether the policy acts in the processes that own the workers, and not in each worker.

    Attributes:
        key: The key of the policy.
        version: The version of the newest weights.
        weights: The newest weights, ``float32 [P]``; None until some are published.
    """

    def __init__(
        self,
        chunks: Chunks,
        pickled: bytes,
        first_version: int,
        guarded: Callable[[Callable[[], None]], None],
        *,
        on_node: bool = False,
    ) -> None:
        self.key, self.version = next(_keys), first_version
        self.weights: NDArray[np.float32] | None = None
        self._chunks, self._guarded = chunks, guarded
        guarded(lambda: chunks.load(self.key, pickled, first_version, on_node=on_node))
        # The policy is dropped later, because a finalizer may run in the middle of another call.
        self._end = weakref.finalize(self, chunks.unused.append, self.key)
        self._end.atexit = False

    def publish(self, weights: NDArray[np.float32]) -> int:
        """Publishes a flat vector of weights, ``float32 [P]``. Every chunk requested from now on uses it.

        Returns:
            The version of these weights, one more than the last version.

        Raises:
            ConfigError: `weights` is not a flat float32 vector, or its size differs from the last one.
        """
        weights = np.array(weights)
        size = "n" if self.weights is None else self.weights.size
        if weights.ndim != 1 or weights.dtype != np.float32 or size not in ("n", weights.size):
            raise ConfigError(
                f"The weights that were published are {weights.dtype} {list(weights.shape)}. They must be float32 "
                f"[{size}]: publish what learner.weights() returns, of the module that the policy wraps."
            )
        self.weights = weights
        self.version += 1
        return self.version

    def drop(self) -> None:
        """Removes the policy and its weights from the workers. The store can't be used afterwards."""
        self._end.detach()
        self._guarded(lambda: self._chunks.drop(self.key))
