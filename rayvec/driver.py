"""A policy that acts in this process, for one group of environments while the others step."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayvec.batching import split_groups
from rayvec.chunks import edges_of
from rayvec.pools.ray import RayPool
from rayvec.rollout import Stopwatch, as_policy, rollout, two_groups_pay
from rayvec.types import Rollout, StepBatch

__all__ = ["DriverActing"]


class DriverActing:
    """Takes chunks of steps from here, and knows which episodes the policy has not seen the beginning of.

    Args:
        pool: What to step.
        groups: How many there are; ``"auto"`` decides after the first chunk.

    Attributes:
        groups: The ids of each.
    """

    def __init__(self, pool: RayPool, groups: Literal[1, 2, "auto"]) -> None:
        self._pool = pool
        self._undecided = groups == "auto"
        self.groups: tuple[NDArray[np.int64], ...] = split_groups(pool.topology, 2 if groups == 2 else 1)
        self._everyone = np.arange(pool.num_envs)
        self._begun = np.ones(pool.num_envs, bool)
        self._policy: Any = None

    def rollout(
        self, policy: Any, num_steps: int, first_step: int, noise_seed: int, weights_version: int = 0
    ) -> Rollout:
        """Takes `num_steps` steps of every environment; arguments as of :func:`rayvec.rollout.rollout`."""
        begun = self._everyone if policy is not self._policy else np.flatnonzero(self._begun)
        self._policy = policy
        self._begun[:] = False
        stopwatch = Stopwatch()
        chunk = rollout(
            self._pool,
            as_policy(policy),
            num_steps,
            noise_seed=noise_seed,
            first_step=first_step,
            groups=self.groups,
            weights_version=weights_version,
            begun=begun,
            stopwatch=stopwatch,
        )
        times = stopwatch.read()
        if self._undecided:
            self._undecided = False
            if two_groups_pay(times.inference_s, times.whole_s - times.inference_s):
                self.groups = split_groups(self._pool.topology, 2)
        return Rollout(edges_of(chunk), chunk, (), (times,), times.whole_s)

    def note_reset(self, env_ids: NDArray[np.int64]) -> None:
        """Takes note of environments that somebody else resets."""
        self._begun[env_ids] = True

    def note_ended(self, batch: StepBatch) -> None:
        """Takes note of episodes that ended in steps that somebody else chose."""
        self._begun[batch.env_ids] |= batch.terminated | batch.truncated

    def note_absence(self) -> None:
        """Takes note that another policy acts meanwhile: a policy that remembers has missed all of it."""
        self._policy = None
