"""Chunks of steps that policies take where the environments are: the policies, and the chunks that are pending."""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data.chunk import StopEarly
from rayvec.data.topology import split_groups
from rayvec.envs.pickled_parts import pickled_for_workers
from rayvec.errors import ConfigError, check_count
from rayvec.fleet.commands import Command, Op
from rayvec.fleet.deferred_signals import uninterrupted
from rayvec.node.machine import Machine
from rayvec.rollout.loop import ChunkRequest, PolicyHost, Rollout, as_policy, join_rollouts
from rayvec.vector.adapter import Adapter, NotReady

MAX_CHUNKS = 2
"""The most chunks of an environment that may be pending."""
_CUT_POLL_S = 1e-3

_keys = itertools.count()
Inference = Literal["worker", "node", "driver"]


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A chunk that was requested and not received. It has a ticket, unless its policy acts in this process.

    Attributes:
        request: What was requested.
        inference: Where the policy acts.
        part: Which part takes it; None for all.
    """

    request: ChunkRequest
    inference: Inference
    part: int | None


class ChunkAdapter(Adapter):
    """Vector environments in which policies take chunks of steps.

    A policy acts in each worker over its own environments, in each node, or in this process over all environments.
    """

    def _allocate(
        self, observation: Space[Any], action: Space[Any], groups: Sequence[NDArray[np.int64]] | None = None
    ) -> None:
        """Allocates the arrays for these spaces; `groups` are those of a policy that acts in the driver."""
        envs = self._envs
        envs.allocate(observation, action)
        self._steps_here, halves = envs.transports == ("local",), None
        if not envs.has_nodes and not self._steps_here:
            units = envs.spaces.unit_bounds
            halves = split_groups(envs.topology, 2 if units is None or len(units) > 2 else 1, units)
        self._host, self._driver = PolicyHost(envs, halves), PolicyHost(envs, groups)
        self._everyone = np.arange(envs.num_envs)
        self._everyone.setflags(write=False)
        self._done = np.zeros(envs.num_envs, bool)  # whose episode has ended, if the caller resets
        self._unused: list[tuple[int, Inference]] = []  # policies whose store is gone
        self._sizes = np.array([len(part) for part in envs.parts])

    def publish(self, policy: Any, first_version: int = 0, *, inference: Inference = "worker") -> WeightStore:
        """Sends a policy to where it acts; returns the store through which it gets its weights.

        The workers forget the policies of stores that were garbage-collected.

        Args:
            policy: Pickled as it is now, unless it acts in the driver.
            first_version: The version of the weights that the policy contains.
            inference: Where it acts: in each worker, in the process that owns the workers of a node, or in this process
                as the object that it is.
        """
        self._assert_idle("publish")
        acting: Any = as_policy(policy)
        if inference != "driver":
            remedy = "Make the object when the policy first acts, or let the policy act here: inference='driver'."
            acting = pickled_for_workers(acting, "a policy", remedy)
        while self._unused and not self._posted:
            self._drop(*self._unused.pop())
        store = WeightStore(self, first_version, inference)
        if (host := self._host_here(inference)) is not None:
            host.load(store.key, acting)
        else:
            more = (inference == "node",) if self._envs.has_nodes else ()
            self._run(Command(Op.LOAD, self._everyone, rest=(store.key, acting, *more)))
        return store

    def _drop(self, key: int, inference: Inference) -> None:
        """Removes a policy."""
        if (host := self._host_here(inference)) is not None:
            host.drop(key)
        else:
            self._run(Command(Op.DROP, self._everyone, rest=(key,)))

    def _host_here(self, inference: Inference) -> PolicyHost | None:
        """Returns what lets a policy act in this process; None if it acts elsewhere."""
        if inference == "driver":
            return self._driver
        is_here = self._steps_here or (inference == "node" and not self._envs.has_nodes)
        return self._host if is_here else None

    @property
    def parts(self) -> tuple[range, ...]:
        """The environments of each part that takes chunks by itself: a worker, or a node of a cluster."""
        return self._envs.parts

    def rollout_async(
        self,
        weights: WeightStore,
        num_steps: int,
        first_step: int,
        noise_seed: int,
        *,
        part: int | None = None,
    ) -> None:
        """Starts a chunk of steps that the workers take with a published policy.

        :meth:`rollout_wait` returns it, and :meth:`receive` the chunk of a part.

        Environments are reset within the step that ends their episode. Until the wait they are busy. Weights may be
        published meanwhile: the next chunk starts with them. Another chunk may be started before the wait; the workers
        then go from one to the other by themselves.

        Args:
            weights: Of the policy.
            num_steps: T.
            first_step: How many steps the environments had taken in chunks before.
            noise_seed: Of the noise.
            part: Index in :attr:`parts` of the only part that takes the chunk; None for all of them together.

        Raises:
            AlreadyPendingCallError: Too many chunks are pending, or one whose policy acts in another process: in the
                workers, or in the process that owns them.
        """
        self._assert_running()
        check_count("num_steps", num_steps)
        request = ChunkRequest(weights.key, num_steps, first_step, noise_seed, weights.version, weights.weights)
        rows = self._everyone if part is None else np.array(self.parts[part])
        self._guarded(self._begin_chunk, request, rows, weights.inference, part)

    def _begin_chunk(
        self, request: ChunkRequest, rows: NDArray[np.int64], inference: Inference, part: int | None
    ) -> None:
        in_order = all(chunk.inference == inference for chunk in self._chunks_of(None))
        if self._pending != "rollout" or not in_order or len(self._chunks_of(part)) >= MAX_CHUNKS:
            self._assert_idle("rollout")
        is_here = self._host_here(inference) is not None
        ticket = None if is_here else self._post(Command(Op.ROLLOUT, rows, rest=request))
        self._done[rows] = False  # every environment whose episode has ended is reset first
        self._posted["rollout", _Pending(request, inference, part)] = ticket

    def _chunks_of(self, part: int | None) -> list[_Pending]:
        chunks = [chunk for name, chunk in self._posted if name == "rollout"]
        return [chunk for chunk in chunks if part is None or chunk.part in (part, None)]

    def _oldest_of(self, parts: Sequence[int | None]) -> list[_Pending]:
        self._assert_pending("rollout")
        return [self._chunks_of(part)[0] for part in parts]

    def rollout_wait(self, timeout: float | None = None, cut: StopEarly | None = None) -> Rollout:
        """Waits for the first :meth:`rollout_async` that has not been waited for, for up to `timeout` seconds.

        Args:
            timeout: The longest wait in seconds; None waits without limit.
            cut: Called about every millisecond with the number of steps that all environments together have taken.
                Once it returns True, every worker ends the chunk after its present step. Requires ``num_nodes=0``.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: It takes longer; it stays pending.
        """
        return self.receive([None], timeout_s=timeout, cut=cut)[1]

    def receive(
        self,
        parts: Sequence[int | None],
        accept: Callable[[int, Rollout], None] = lambda index, rollout: None,
        timeout_s: float | None = None,
        cut: StopEarly | None = None,
    ) -> tuple[int, Rollout]:
        """Waits until one of some parts has finished its oldest pending chunk; see :meth:`rollout_wait`.

        Args:
            parts: The parts, in the order of preference if several have finished; None for all together.
            accept: Called with what is returned. After Ctrl-C the chunk is still pending, or it was accepted; where the
                policy acts in this process, Ctrl-C closes the environments.
            timeout_s: The longest wait.
            cut: As of :meth:`rollout_wait`.

        Returns:
            The index of the part, and its chunk.
        """
        chunks = self._guarded(self._oldest_of, parts, stays_open=(BaseException,))
        if cut is not None and self._envs.has_nodes:
            raise ConfigError("`cut` was passed with environments on Ray. Leave it out, or pass num_nodes=0.")
        if (host := self._host_here(chunks[0].inference)) is not None:
            return self._guarded(self._take_here, host, chunks[0], accept, cut)
        return self._guarded(self._received, chunks, accept, timeout_s, cut, stays_open=(KeyboardInterrupt,))

    def _received(
        self,
        chunks: Sequence[_Pending],
        accept: Callable[[int, Rollout], None],
        timeout_s: float | None,
        cut: StopEarly | None,
    ) -> tuple[int, Rollout]:
        """Receives the first of some chunks that has been taken."""
        began_s, timeout_s = time.monotonic(), math.inf if timeout_s is None else timeout_s
        index, deadline, tickets = 0, began_s + timeout_s, [self._posted["rollout", chunk] for chunk in chunks]
        if len(chunks) > 1:
            answered = self._envs.wait_some(tickets, timeout_s=timeout_s)
            index = answered[0] if answered else 0
        ticket = tickets[index]
        if cut is not None:
            self._wait_or_cut(ticket, deadline, cut)
        if not self._envs.wait(ticket, max(0.0, deadline - time.monotonic())):
            raise NotReady("the chunk has not been taken in time")
        rollout = join_rollouts(self._accepted(self._envs.take(ticket)).value)
        rollout = rollout._replace(waited_s=time.monotonic() - began_s)
        with uninterrupted():
            del self._posted["rollout", chunks[index]]
            accept(index, rollout)
        return index, rollout

    def _take_here(
        self, host: PolicyHost, chunk: _Pending, accept: Callable[[int, Rollout], None], cut: StopEarly | None
    ) -> tuple[int, Rollout]:
        """Takes a chunk for which a policy acts in this process."""
        del self._posted["rollout", chunk]  # now: the policy may call the environments
        self.num_uses += 1
        self._done[:] = False
        try:
            rollout = host.take(chunk.request, cut)
        except BaseException as error:
            self._close_failed(error)  # also after an error of another vector environment, which the policy may step
            raise
        finally:
            self._log(host.take_notes())
        if self._envs.layout.objects:  # else the caller could change them
            of_caller = replace(rollout.chunk, last_obs=deepcopy(rollout.chunk.last_obs))
            rollout = rollout._replace(chunk=of_caller)
        rollout = rollout._replace(waited_s=rollout.times[0].whole_s)
        accept(0, rollout)
        return 0, rollout

    def _wait_or_cut(self, ticket: Any, deadline: float, cut: StopEarly) -> None:
        """Waits until all parts have taken a chunk, or `cut` returns True: then each ends it after its present step."""
        machine = cast("Machine", self._envs)
        while not machine.wait(ticket, _CUT_POLL_S) and time.monotonic() < deadline:
            taken = machine.steps_in(ticket)
            if cut(int(taken @ self._sizes)):
                machine.cut(ticket)
                return


class WeightStore:
    """One policy that was sent to the environments, and the newest version of its weights.

    Args:
        env: The environments.
        first_version: The version of the weights that the policy contains.
        inference: Where the policy acts.

    Attributes:
        key: The key of the policy.
        inference: As given.
        version: The version of the newest weights.
        weights: The newest weights, ``float32 [P]``; None until some are published.
    """

    def __init__(self, env: ChunkAdapter, first_version: int, inference: Inference) -> None:
        self.key, self.version, self.inference = next(_keys), first_version, inference
        self.weights: NDArray[np.float32] | None = None
        self._env = env
        # The policy is dropped later, because a finalizer may run in the middle of another call.
        self._end = weakref.finalize(self, env._unused.append, (self.key, inference))
        self._end.atexit = False

    def publish(self, weights: NDArray[np.float32]) -> int:
        """Publishes a flat vector of weights, ``float32 [P]``. Every chunk requested from now on uses it.

        A policy that acts in the driver loads it at once.

        Returns:
            The version of these weights, one more than the last version.

        Raises:
            ConfigError: `weights` is not a flat float32 vector, its size differs from the last one, or a policy that
                acts in the driver refuses it.
        """
        weights = np.array(weights)
        size = "n" if self.weights is None else self.weights.size
        if weights.ndim != 1 or weights.dtype != np.float32 or size not in ("n", weights.size):
            raise ConfigError(
                f"The weights that were published are {weights.dtype} {list(weights.shape)}. They must be float32 "
                f"[{size}]: publish what learner.weights() returns, of the module that the policy wraps."
            )
        if self.inference == "driver":
            self._env._driver.load_weights(self.key, weights, self.version + 1)
        self.weights = weights
        self.version += 1
        return self.version

    def drop(self) -> None:
        """Removes the policy and its weights from the workers. The store can't be used afterwards."""
        self._end.detach()
        self._env._drop(self.key, self.inference)
