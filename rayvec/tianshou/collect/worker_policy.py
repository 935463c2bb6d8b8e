"""The policy of a Tianshou collector in the workers of its environments."""

from __future__ import annotations

import logging
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space
from tianshou.algorithm.algorithm_base import Policy

from rayvec.pools.publish_weights import WeightStore
from rayvec.tianshou.env.vector_env import RayVectorEnv
from rayvec.tianshou.policies import RandomActions, TianshouPolicy

__all__ = ["WorkerPolicy"]

logger = logging.getLogger(__name__)


class WorkerPolicy:
    """Publishes the state of a policy, and random actions, to the workers that step environments.

    Args:
        env: The environments.
        policy: The policy.
        exploration_noise: Whether to add the policy's exploration noise.

    Attributes:
        env: The environments.
        store: The policy in the workers; None before :meth:`publish`.
        random_store: Random actions in the workers; None before :meth:`at_random`.
    """

    def __init__(self, env: RayVectorEnv, policy: Policy, exploration_noise: bool) -> None:
        self.env = env
        self.store: WeightStore | None
        self.random_store: WeightStore | None = None
        self._next_version = 0
        self.set_policy(policy, exploration_noise)

    def has_policy(self, policy: Policy, exploration_noise: bool) -> bool:
        """Whether this policy was set last, with the same noise."""
        return policy is self._policy and exploration_noise == self._exploration_noise

    def set_policy(self, policy: Policy, exploration_noise: bool) -> None:
        """Sets the policy that the next `publish` sends."""
        self._acting = TianshouPolicy(policy, exploration_noise=exploration_noise)
        self._policy, self._exploration_noise = policy, exploration_noise
        self.store = None
        self._is_picklable = True
        self._published = np.zeros(0, np.float32)
        self._structure = b""

    def publish(self) -> bool:
        """Gives the workers the policy as it is now; returns False if the policy can't be pickled."""
        if not self._is_picklable:
            return False
        weights = self._acting.weights()
        try:
            structure = self._acting.structure()
        except Exception as error:
            logger.warning("the policy acts in the driver, since it can't be pickled: %s", error)
            self._is_picklable = False
            return False
        if self.store is None or structure != self._structure:
            self.store = None  # the workers drop an older one
            self.store = self.env.publish_pickled(cloudpickle.dumps(self._acting), self._next_version)
        elif weights.tobytes() != self._published.tobytes():
            self.store.publish(weights)
        self._published, self._structure = weights, structure
        self._next_version = self.store.version + 1
        return True

    def at_random(self, space: Space[Any]) -> WeightStore:
        """Returns random actions of a space in the workers."""
        if self.random_store is None:
            self.random_store = self.env.publish_pickled(cloudpickle.dumps(RandomActions(space)))
        return self.random_store
