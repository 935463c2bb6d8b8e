"""Chunks of steps with a policy, taken by the workers or from the driver."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, Rollout
from rayvec.errors import NodeLostError, WorkerLostError, check_choice, check_count
from rayvec.pools.base import ActingPool, Cut
from rayvec.pools.weights import WeightStore
from rayvec.rollout.loop import as_policy
from rayvec.vector.driver import DriverActing
from rayvec.vector.guarded import GuardedCalls

__all__ = ["ChunkCalls"]


class ChunkCalls(GuardedCalls):
    """The part of a vector environment that lets policies act."""

    _pool: ActingPool
    _driver: DriverActing
    _done: NDArray[np.bool_]
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
                self._local_policy = (policy, self._store(policy))
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

    def rollout_async(
        self, weights: WeightStore, num_steps: int, first_step: int, noise_seed: int, *, by_reference: bool = False
    ) -> None:
        """Starts what :meth:`rollout_workers` does; :meth:`rollout_wait` returns its result.

        Until then the environments are busy, but weights may be published: the next chunk that is asked for begins
        with them. That may be while one is under way: the workers then go from one to the other by themselves.
        """
        if self._pending == "rollout" and self._pool.acting.has_room:
            check_count("num_steps", num_steps)
        else:
            self._begin_rollout(num_steps)
        self._guarded(
            lambda: self._pool.begin_rollout(weights.key, num_steps, first_step, noise_seed, by_reference=by_reference)
        )
        self._pending = "rollout"

    def rollout_wait(self, timeout: float | None = None, cut: Cut | None = None) -> Rollout:
        """Waits for the first :meth:`rollout_async` that has not been waited for, for up to `timeout` seconds.

        Args:
            timeout: The longest wait in seconds; None waits without limit.
            cut: Called about every millisecond with the number of steps that all environments together have taken.
                Once it returns True, every worker ends the chunk after its next step. Requires ``num_nodes=0``.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: It takes longer; it stays pending.
        """
        self._assert_pending("rollout")
        fatal = BaseException if self._pool.steps_here else Exception  # Ctrl-C leaves pending what others do
        num_pending = self._pool.acting.num_pending
        try:
            result = self._guarded(lambda: self._pool.finish_rollout(timeout, cut), fatal)
        except KeyboardInterrupt:
            if not self.closed and self._pool.acting.num_pending < num_pending:  # the chunk is lost
                self.close()
            raise
        if not self._pool.acting.num_pending:
            self._pending = None
        self._driver.note_absence()
        return result

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
        self._begin_rollout(num_steps)
        args = (policy, num_steps, first_step, noise_seed, weights_version, cut)
        return self._guarded(lambda: self._driver.rollout(*args))

    def publish(self, policy: Any, first_version: int = 0) -> WeightStore:
        """Sends a policy to every worker; returns the store through which it gets its weights.

        Args:
            policy: Pickled as it is now.
            first_version: Of the weights that it brings along.
        """
        self._assert_idle("publish")
        return self._store(policy, first_version)

    def _store(self, policy: Any, first_version: int = 0) -> WeightStore:
        guarded = partial(self._guarded, fatal=(NodeLostError, WorkerLostError, KeyboardInterrupt))
        return WeightStore(self._pool, as_policy(policy), first_version, guarded)  # what a policy raises is no loss

    def _begin_rollout(self, num_steps: int) -> None:
        self._assert_idle("rollout")
        check_count("num_steps", num_steps)
        self._done[:] = False  # every environment whose episode has ended is reset first
