"""Chunks of steps with a policy, taken by the workers or from the driver."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from rayvec.data import Chunk, Rollout
from rayvec.errors import check_choice, check_count
from rayvec.pools.base import Cut
from rayvec.pools.weights import WeightStore
from rayvec.vector.adapter import PoolAdapter
from rayvec.vector.driver import DriverActing

__all__ = ["ChunkCalls"]


class ChunkCalls(PoolAdapter, VectorEnv[Any, Any, NDArray[Any]]):
    """The part of a vector environment that lets policies act."""

    _driver: DriverActing
    _done: NDArray[np.bool_]  # whose episode has ended, if the caller resets
    _local_policy: tuple[Any, WeightStore] | None
    _chunk_steps: int
    _noise_seed: int

    def rollout(
        self,
        policy: Any,
        num_steps: int,
        inference: Literal["worker", "driver"] = "worker",
        seed: int | None = None,
    ) -> Chunk:
        """Lets a policy take steps of every environment, without contacting the driver between steps.

        Environments are reset within the step that ends their episode, whatever `autoreset_mode` is.

        Args:
            policy: A callable from observations to actions, or a :class:`rayvec.Policy`. A policy that has
                been passed last is not sent again, so what changes in it meanwhile does not reach the workers; a
                :class:`rayvec.Collector` publishes weights.
            num_steps: T.
            inference: Where the policy acts: in every worker over its own slice, or in this process.
            seed: Resets all environments first, with base + index, and is the seed of the noise, as a call of
                :meth:`reset` with one int is; without either, the noise can't be repeated.
        """
        self._assert_idle("rollout")
        check_choice("inference", inference, ("worker", "driver"))
        if seed is not None:
            self.reset(seed=seed)
        if inference == "worker":
            if self._local_policy is None or self._local_policy[0] is not policy:
                before, self._local_policy = self._local_policy, None
                if before is not None:
                    before[1].drop()
                self._local_policy = (policy, self.publish(policy))
            taken = self.rollout_workers(self._local_policy[1], num_steps, self._chunk_steps, self._noise_seed)
        else:
            taken = self.rollout_driver(policy, num_steps, self._chunk_steps, self._noise_seed)
        self._chunk_steps += num_steps
        assert taken.chunk is not None
        return taken.chunk

    def rollout_workers(
        self, weights: WeightStore, num_steps: int, first_step: int, noise_seed: int, *, by_reference: bool = False
    ) -> Rollout:
        """Lets the workers act with a published policy.

        Args:
            weights: Of the policy.
            num_steps: T.
            first_step: How many steps the environments had taken in chunks before.
            noise_seed: Of the noise.
            by_reference: Whether the chunk stays in the object store.
        """
        self.rollout_async(weights, num_steps, first_step, noise_seed, by_reference=by_reference)
        return self.rollout_wait()

    def rollout_wait(self, timeout: float | None = None, cut: Cut | None = None) -> Rollout:
        """See :class:`~rayvec.vector.adapter.PoolAdapter`."""
        rollout = super().rollout_wait(timeout, cut)
        self._done[:] = False  # environments whose episode has ended were reset
        self._driver.note_absence()
        return rollout

    def rollout_driver(
        self,
        policy: Any,
        num_steps: int,
        first_step: int,
        noise_seed: int,
        weights_version: int = 0,
        cut: Cut | None = None,
    ) -> Rollout:
        """Acts in this process, for one group while the others step."""
        self._assert_idle("rollout")
        check_count("num_steps", num_steps)
        self._done[:] = False  # every environment whose episode has ended is reset first
        args = (policy, num_steps, first_step, noise_seed, weights_version, cut)
        return self._guarded(lambda: self._driver.rollout(*args))
