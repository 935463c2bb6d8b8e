"""The policy of `RayVecEnv.rollout`: how it and its weights reach the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.policies.policy import Policy
from rayvec.vector.weights import WeightStore

__all__ = ["RolloutPolicy"]


class RolloutPolicy:
    """Sends a policy to the workers once, and after that only the weights that it has loaded.

    Hidden states stay in the workers where only weights are sent. A subclass of :class:`rayvec.Policy` that overrides
    `load_weights` is sent again as a whole: the workers' copy would change the loaded weights a second time.
    """

    def __init__(self) -> None:
        self._policy: Any = None
        self._on_node = False
        self._store: WeightStore | None = None
        self._loaded: NDArray[np.float32] | None = None

    def send(self, publish: Callable[..., WeightStore], policy: Any, *, on_node: bool) -> WeightStore:
        """Sends what the workers lack of a policy; returns the store through which it gets its weights.

        Args:
            publish: Sends a policy to the workers, as ``Adapter.publish`` does.
            policy: The policy.
            on_node: Whether it acts in the process that owns the workers of a node, in place of each worker.
        """
        loaded = None
        if isinstance(policy, Policy):
            policy.keep_loaded_weights()
            loaded = policy.loaded_weights
        store, is_same = self._store, self._policy is policy and self._on_node == on_node
        if store is not None and is_same and loaded is self._loaded:
            return store
        if store is not None and is_same and type(policy).load_weights is Policy.load_weights:
            assert loaded is not None
            store.publish(loaded)
        else:
            if store is not None:
                self._store = None
                store.drop()
            store = publish(policy, on_node=on_node)
        self._policy, self._on_node, self._store, self._loaded = policy, on_node, store, loaded
        return store
