"""The policy of a Tianshou collector in the workers of its environments."""

from __future__ import annotations

from typing import Any

import cloudpickle
from gymnasium import Space
from tianshou.algorithm.algorithm_base import Policy

from rayvec.tianshou.env.vector_env import RayVectorEnv
from rayvec.tianshou.policies import RandomActions, TianshouPolicy
from rayvec.vector.chunks import WeightStore

__all__ = ["WorkerPolicy"]


class WorkerPolicy:
    """Publishes the state of a policy, and random actions, to the workers that step environments.

    Args:
        env: The environments.

    Attributes:
        store: The policy in the workers; None before :meth:`publish`.
        random_store: Random actions in the workers; None before :meth:`at_random`.
    """

    def __init__(self, env: RayVectorEnv) -> None:
        self._env = env
        self.store: WeightStore | None = None
        self.random_store: WeightStore | None = None
        self._published: tuple[Any, bytes] = (None, b"")

    def publish(self, policy: Policy, exploration_noise: bool) -> tuple[WeightStore, bool]:
        """Gives the workers the policy as it is now; returns it, and whether it was copied to them once more."""
        acting = TianshouPolicy(policy, exploration_noise=exploration_noise)
        structure, weights = (exploration_noise, acting.structure()), acting.weights()
        store, (old_structure, old_weights) = self.store, self._published
        if store is None or structure != old_structure:
            version = 0 if store is None else store.version + 1
            self.store = None  # the workers drop an older one
            self.store = self._env.publish_pickled(cloudpickle.dumps(acting), version)
        elif weights.tobytes() != old_weights:
            store.publish(weights)
        self._published = (structure, weights.tobytes())
        return self.store, store is not None and self.store is not store  # type: ignore[return-value]

    def at_random(self, space: Space[Any]) -> WeightStore:
        """Returns random actions of a space in the workers."""
        if self.random_store is None:
            self.random_store = self._env.publish_pickled(cloudpickle.dumps(RandomActions(space)))
        return self.random_store
