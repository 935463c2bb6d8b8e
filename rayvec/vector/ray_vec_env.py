"""The Gymnasium API of a cluster of environments."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from rayvec.data import Chunk, Rollout, StepBatch, Topology, Tree, tree_map
from rayvec.envs.factory import EnvFactory, env_seeds
from rayvec.errors import ConfigError, NodeLostError, WorkerLostError, check_choice, check_count, message
from rayvec.node.local_pool import LocalPool
from rayvec.node.process_pool import ProcessPool
from rayvec.pools.base import ActingPool, Autoreset, NotReady, PoolSpaces, Supervision
from rayvec.pools.memory import ArrayLayout
from rayvec.pools.weights import WeightStore
from rayvec.rollout.loop import as_policy
from rayvec.vector.batching import (
    InfoMerger,
    batched_observations,
    check_number,
    checked_actions,
    checked_mask,
    parse_autoreset_mode,
)
from rayvec.vector.driver import DriverActing

__all__ = ["RayVecEnv", "make_vec"]

_T = TypeVar("_T")
_Fatal = type[BaseException] | tuple[type[BaseException], ...]
_MODES = {
    AutoresetMode.NEXT_STEP: Autoreset.NEXT_STEP,
    AutoresetMode.SAME_STEP: Autoreset.SAME_STEP,
    AutoresetMode.DISABLED: Autoreset.DISABLED,
}


class RayVecEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """Environments on every core of a Ray cluster, as one Gymnasium vector environment.

    For the same seeds and actions, it returns bit for bit the same results as ``gymnasium.vector.SyncVectorEnv``,
    with any number of nodes and workers. If Ray is already initialised, it uses that Ray and does not shut it down.
    Otherwise it uses ``address``, ``RAY_ADDRESS`` or a private local cluster, in this order.

    Args:
        env: An id, a spec, or one callable for each environment. The workers call the callables.
        num_envs: Number of environments; optional with callables. It need not be divisible by the number of
            workers.
        env_kwargs: Passed to ``gymnasium.make``.
        wrappers: Applied to each environment in order.
        copy: Whether observations are copies, or views that the next step overwrites.
        autoreset_mode: When to reset an environment whose episode has ended.
        observation_mode: ``"same"``, ``"different"`` (spaces that differ in their bounds), or a pair of the
            batched and the single space.
        num_nodes: How many nodes to use; by default all that have free cores. 0 uses this machine without Ray.
        workers_per_node: Worker processes on each node; by default one for each free core, and with ``num_nodes=0``
            one for each core. With ``num_nodes=0`` it may be 0: this process then steps the environments one after
            another. Use that for debuggers and for environments whose step takes microseconds. It can't be combined
            with ``step_timeout_s``.
        groups: 1, or 2 so that the policy acts for one half while the other half steps. ``"auto"`` alternates between
            1 and 2 in the first four chunks with inference in the driver, and keeps the faster.
        step_timeout_s: Seconds that a worker may take for one step of its environments, also within a chunk. A worker
            that takes longer counts as hung and is killed. There is no limit by default. A whole chunk of T steps,
            including inference, may take T times as long.
        start_timeout_s: Seconds that a worker may take to create its environments. A worker that takes longer counts
            as hung and is killed; the error shows its stack.
        on_env_error: What happens if an environment raises, or if its worker exits or hangs. ``"raise"`` closes
            everything. ``"restart"`` restarts the affected environments, and the others continue. A failed step
            returns the last valid observation, with reward 0, truncated, and ``info["env_restarted"]``.
        on_node_loss: What happens to the environments of a lost node. ``"rehost"`` restarts them on the remaining
            nodes, as above; ``"raise"`` raises ``NodeLostError``.
        preload: Modules that the workers import once for each node, such as ``("torch",)``.
        address: Address of a running Ray cluster.

    Raises:
        ConfigError: The settings are invalid, or the cluster lacks the cores for them.
        Exception: The constructor of an environment raised it; its ``__cause__`` is an ``EnvError``.
    """

    def __init__(
        self,
        env: str | EnvSpec | Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        num_envs: int | None = None,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Callable[[Any], Any]] = (),
        copy: bool = True,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        num_nodes: int | None = None,
        workers_per_node: int | None = None,
        groups: Literal[1, 2, "auto"] = 1,
        step_timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        on_env_error: Literal["raise", "restart"] = "raise",
        on_node_loss: Literal["rehost", "raise"] = "rehost",
        preload: Sequence[str] = (),
        address: str | None = None,
    ) -> None:
        self.closed = True  # until everything is running; __del__ reads it
        self._creator = os.getpid()
        self._pending: str | None = None
        self._late = False  # whether a wait for the pending call has timed out
        check_choice("groups", groups, (1, 2, "auto"))
        check_choice("on_node_loss", on_node_loss, ("rehost", "raise"))
        supervision = Supervision.of(on_env_error, step_timeout_s, start_timeout_s)
        factory = EnvFactory.build(env, num_envs, env_kwargs, wrappers)
        self.num_envs = factory.num_envs
        self.spec = factory.spec
        self.copy = copy
        self.autoreset_mode = parse_autoreset_mode(autoreset_mode)
        self._autoreset = _MODES[self.autoreset_mode]
        self._pool: ActingPool
        if num_nodes == 0 and num_nodes is not False:
            self._pool = _open_local(factory, supervision, workers_per_node, preload, address)
        else:
            from rayvec.cluster.ray_pool import RayPool  # importing Ray takes a third of a second

            self._pool = RayPool.open(
                factory,
                num_nodes=num_nodes,
                workers_per_node=workers_per_node,
                preload=preload,
                supervision=supervision,
                rehost=on_node_loss == "rehost",
                address=address,
            )
        self.closed = False
        try:
            self._take_spaces(self._pool.spaces, observation_mode)
            self._pool.allocate(self.single_observation_space, self.single_action_space)
        except BaseException:
            self.close()
            raise
        self._action_layout = ArrayLayout.of(self.single_action_space)
        self._everyone = np.arange(self.num_envs)
        self._driver = DriverActing(self._pool, groups)
        shape = None if self._action_layout is None else self.single_action_space.shape
        sizes = {self.num_envs, *map(len, self.groups)}
        self._group_shapes = {} if shape is None else {size: (size, *shape) for size in sizes}
        self._merger = InfoMerger(self.num_envs)
        self._pending_groups: set[int] = set()
        self._collect_call: Callable[[float | None], list[Any]] | None = None
        self._done = np.zeros(self.num_envs, bool)
        self._chunk_steps = 0
        self._noise_seed = secrets.randbits(63)
        self._local_policy: tuple[Any, WeightStore] | None = None

    def _take_spaces(self, spaces: PoolSpaces, mode: str | tuple[Space[Any], Space[Any]]) -> None:
        self.metadata = {**spaces.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = spaces.render_mode
        self.single_action_space = spaces.action
        self.action_space = batch_space(spaces.action, self.num_envs)
        self.observation_space, self.single_observation_space = batched_observations(spaces, mode, self.num_envs)

    @property
    def groups(self) -> tuple[NDArray[np.int64], ...]:
        """The environment ids of each group."""
        return self._driver.groups

    @property
    def topology(self) -> Topology:
        """Which node holds which environments, and how many workers step them."""
        return self._pool.topology

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node is reached: ``"shm"`` or ``"tcp"``, or ``"local"`` if this process steps the environments."""
        return self._pool.transports

    def worker_pids(self) -> dict[str, list[int]]:
        """Returns process ids by node name: that of the workers' parent process, then those of the workers."""
        self._assert_idle("worker_pids")
        return self._pool.worker_pids()

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Seed of each environment."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of each environment's random generator."""
        return self.get_attr("np_random")

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Resets all environments, or those that ``options["reset_mask"]`` (``bool [N]``) selects.

        Args:
            seed: A base seed, to which each environment's index is added; a list of N seeds; or None.
            options: Passed to each environment without the mask.

        Returns:
            The observation of every environment, and the infos of those that were reset.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Starts a reset as :meth:`reset` does; :meth:`reset_wait` returns the result."""
        self._assert_idle("reset_async")
        seeds = env_seeds(seed, self.num_envs)
        options = None if options is None else dict(options)
        mask = None if options is None else options.pop("reset_mask", None)
        ids = self._everyone if mask is None else np.flatnonzero(checked_mask(mask, self.num_envs))

        def start() -> None:
            self._pool.reset(ids, [seeds[i] for i in ids.tolist()], options)
            self._reset_ids = ids
            self._reset_batch: StepBatch | None = None
            self._pending = "reset"

        self._guarded(start)
        if isinstance(seed, int):
            self._chunk_steps, self._noise_seed = 0, seed
        self._done[ids] = False
        self._driver.note_reset(ids)

    def reset_wait(self, timeout: float | None = None) -> tuple[Tree, dict[str, Any]]:
        """Waits up to `timeout` seconds for :meth:`reset_async`.

        Raises:
            NoAsyncCallError: No such call is pending.
            multiprocessing.TimeoutError: The timeout expired; the call stays pending.
        """
        self._assert_pending("reset")
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._reset_batch is None:
            batch = self._recv(self._reset_ids, timeout)
            self._note_done(batch)
            if len(self._reset_ids) < self.num_envs:  # request all current observations, once
                self._guarded(lambda: self._pool.ready(self._everyone, begin=False))
            self._reset_batch = batch
        batch = self._reset_batch
        if len(self._reset_ids) < self.num_envs:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            batch = replace(self._recv(self._everyone, left), info=batch.info)
        self._pending = self._reset_batch = None
        return self._observations(batch), self._merger.merge(batch.info)

    def step(
        self, actions: Any
    ) -> tuple[Tree, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Steps every environment.

        Args:
            actions: An element of :attr:`action_space`.

        Returns:
            Observations, tree of ``[N, *obs_shape]``; rewards, ``float64 [N]``; terminated and truncated,
            ``bool [N]``; infos, merged as Gymnasium merges them.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Starts a step as :meth:`step` does; :meth:`step_wait` returns the result."""
        self._assert_idle("step_async")
        self._send(self._everyone, actions, self.action_space)

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Tree, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Waits up to `timeout` seconds for :meth:`step_async`.

        Raises:
            NoAsyncCallError: No such call is pending.
            multiprocessing.TimeoutError: The timeout expired; the call stays pending.
        """
        batch = self._wait("step", self._everyone, timeout)
        return (
            self._observations(batch),
            batch.rew.copy(),
            batch.terminated.copy(),
            batch.truncated.copy(),
            self._merger.merge(batch.info),
        )

    def send(self, actions: Any, group: int = 0) -> None:
        """Starts a step of one group, whose environments are ``groups[group]``.

        Args:
            actions: Tree of ``[k, *act_shape]`` in the order of the group.
            group: Index of the group. Several groups may be pending, each with one step.
        """
        self._assert_running()
        if self._pending is not None or group in self._pending_groups:
            raise AlreadyPendingCallError(
                f"Calling `send` for group {group} while it waits for a pending call to complete.", "send"
            )
        ids = self._group(group)
        self._send(ids, actions, batch_space(self.single_action_space, len(ids)), group)

    def recv(self, group: int = 0, timeout: float | None = None) -> StepBatch:
        """Waits for the step of one group.

        Returns:
            The answers in the order of ``groups[group]``; `info` is merged, indexed by position in the group.
        """
        self._assert_running()
        ids = self._group(group)
        if group not in self._pending_groups:
            raise NoAsyncCallError(f"Calling `recv` for group {group} without any prior call to `send`.", "send")
        batch = self._recv(ids, timeout)
        self._pending_groups.discard(group)
        self._note_done(batch)
        rows = {env_id: row for row, env_id in enumerate(ids.tolist())}
        infos = [info._replace(env_id=rows[info.env_id]) for info in batch.info]
        return StepBatch(
            ids.copy(),
            self._observations(batch),
            batch.rew.copy(),
            batch.terminated.copy(),
            batch.truncated.copy(),
            InfoMerger(len(ids)).merge(infos),
        )

    def rollout(
        self,
        policy: Any,
        num_steps: int,
        inference: Literal["worker", "driver"] = "worker",
        seed: int | None = None,
    ) -> Chunk:
        """Collects a chunk: a policy steps every environment `num_steps` times in one call.

        Environments are reset in the step that ends their episode, regardless of `autoreset_mode`.

        Args:
            policy: A callable from observations to actions, or a :class:`rayvec.Policy`. If it is the policy of the
                previous call, it is not sent again: later changes to it do not reach the workers. Use a
                :class:`rayvec.Collector` to publish weights.
            num_steps: T.
            inference: Where the policy acts: in every worker over its own slice, or in this process.
            seed: Resets all environments first, with seeds base + index, and seeds the policy's noise. A call of
                :meth:`reset` with one int also seeds the noise. Without either, the noise is not reproducible.
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
        """Collects a chunk with a published policy in the workers.

        Args:
            weights: Weight store of the policy.
            num_steps: T.
            first_step: Number of steps that the environments took in earlier chunks.
            noise_seed: Seed of the policy's noise.
            by_reference: Whether the chunk stays in the object store of its nodes.
        """
        self.rollout_async(weights, num_steps, first_step, noise_seed, by_reference=by_reference)
        return self.rollout_wait()

    def rollout_async(
        self, weights: WeightStore, num_steps: int, first_step: int, noise_seed: int, *, by_reference: bool = False
    ) -> None:
        """Starts a chunk as :meth:`rollout_workers` does; :meth:`rollout_wait` returns the result.

        While a chunk is pending, the environments are busy, but weights may be published. The next requested chunk
        starts with them. It may be requested while one is pending: the workers then start it without the driver.
        """
        if self._pending == "rollout" and self._pool.acting.has_room:
            check_count("num_steps", num_steps)
        else:
            self._begin_rollout(num_steps)
        self._guarded(
            lambda: self._pool.begin_rollout(weights.key, num_steps, first_step, noise_seed, by_reference=by_reference)
        )
        self._pending = "rollout"

    def rollout_wait(self, timeout: float | None = None) -> Rollout:
        """Waits up to `timeout` seconds for the oldest pending :meth:`rollout_async`.

        Raises:
            NoAsyncCallError: No such call is pending.
            multiprocessing.TimeoutError: The timeout expired; the call stays pending.
        """
        self._assert_pending("rollout")
        fatal = BaseException if self._pool.steps_here else Exception  # after Ctrl-C, chunks in workers stay pending
        result = self._guarded(lambda: self._pool.finish_rollout(timeout), fatal)
        if not self._pool.acting.num_under_way:
            self._pending = None
        self._driver.note_absence()
        return result

    def rollout_driver(
        self, policy: Any, num_steps: int, first_step: int, noise_seed: int, weights_version: int = 0
    ) -> Rollout:
        """Collects a chunk with the policy in this process: it acts for one group while the other steps."""
        self._begin_rollout(num_steps)
        return self._guarded(lambda: self._driver.rollout(policy, num_steps, first_step, noise_seed, weights_version))

    def publish(self, policy: Any, first_version: int = 0) -> WeightStore:
        """Sends a policy to every worker; returns the store that publishes its weights.

        Args:
            policy: The policy, pickled in its current state.
            first_version: Version of the policy's current weights.
        """
        self._assert_idle("publish")
        return self._store(policy, first_version)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method, or gets an attribute, of each environment; returns the results in order of the ids."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Starts a call as :meth:`call` does; :meth:`call_wait` returns the result."""
        self._assert_idle("call_async")
        self._collect_call = self._guarded(lambda: self._pool.call(name, args, kwargs, self._everyone))
        self._pending = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits up to `timeout` seconds for :meth:`call_async`."""
        self._assert_pending("call")
        collect = self._collect_call
        assert collect is not None
        results = self._guarded(lambda: collect(timeout))
        self._pending = None
        return tuple(results)

    def render(self) -> tuple[Any, ...]:
        """Returns the rendering of each environment."""
        return self.call("render")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns an attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each environment: a list or tuple of N values, or one value for all."""
        self._assert_idle("set_attr")
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                message(
                    "A list of values has one for each environment.",
                    expected=f"{self.num_envs} values",
                    got=len(values),
                    remedy="Pass one value that is no list or tuple to set it everywhere.",
                )
            )
        self._guarded(lambda: self._pool.set_attr(name, values, self._everyone))

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the environments, stops the workers and actors, and stops a private Ray cluster after its last use.

        It does not wait for pending calls. If a reset, step or call is pending, its result is discarded with a
        warning, unless a wait for it has timed out.

        Args:
            timeout: Seconds that the environments get to finish their pending operation and close, 10 by default.
                Then their workers are killed.
            terminate: Whether to kill the workers at once, without closing the environments.
        """
        self.closed = True
        if os.getpid() != self._creator:  # in a forked child: the parent owns the pool
            return
        pending, self._pending = self._pending, None
        self._pool.close(0.0 if terminate else timeout)
        if pending in ("reset", "step", "call") and not self._late:
            gymnasium.logger.warn(f"Calling `close` while waiting for a pending call to `{pending}` to complete.")

    def __enter__(self) -> Self:
        """Returns itself; leaving the block closes the environments."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes the environments."""
        self.close()

    def __del__(self) -> None:
        """Closes the environments if :meth:`close` was not called."""
        if not getattr(self, "closed", True) and not sys.is_finalizing():
            self._pending = None  # no caller is left to wait for the result
            self.close()

    # Helpers of the public methods.

    def _send(self, ids: NDArray[np.int64], actions: Any, space: Space[Any], group: int | None = None) -> None:
        if self._autoreset == Autoreset.DISABLED:
            assert not self._done[ids].any(), f"environments {np.flatnonzero(self._done).tolist()} must be reset first"
        layout = self._action_layout
        if layout is None:
            checked: Any = list(iterate(space, actions))
            check_number(len(checked), len(ids), space)
        elif type(actions) is np.ndarray and actions.shape == self._group_shapes.get(len(ids)):
            checked = actions
        else:
            checked = checked_actions(actions, layout, len(ids), space)

        def start() -> None:
            self._pool.send(ids, checked, self._autoreset)
            if group is None:
                self._pending = "step"
            else:
                self._pending_groups.add(group)

        self._guarded(start)

    def _store(self, policy: Any, first_version: int = 0) -> WeightStore:
        guarded = partial(self._guarded, fatal=(NodeLostError, WorkerLostError, KeyboardInterrupt))
        return WeightStore(self._pool, as_policy(policy), first_version, guarded)  # a policy's exception closes nothing

    def _begin_rollout(self, num_steps: int) -> None:
        self._assert_idle("rollout")
        check_count("num_steps", num_steps)
        self._done[:] = False  # the rollout resets environments whose episode has ended

    def _wait(self, what: str, ids: NDArray[np.int64], timeout: float | None) -> StepBatch:
        self._assert_pending(what)
        batch = self._recv(ids, timeout)
        self._pending = None
        self._note_done(batch)
        return batch

    def _recv(self, ids: NDArray[np.int64], timeout: float | None) -> StepBatch:
        return self._guarded(lambda: self._pool.recv(ids, timeout_s=timeout))

    def _guarded(self, function: Callable[[], _T], fatal: _Fatal = BaseException) -> _T:
        """Runs a function that uses the pool. A timeout leaves the pool open; a `fatal` error closes it.

        By default Ctrl-C is fatal too, because a later answer could then be that of an earlier step.
        """
        try:
            return function()
        except NotReady as error:
            self._late = True
            raise multiprocessing.TimeoutError(str(error)) from error
        except fatal as error:
            self._pending = None
            if self.closed and isinstance(error, Exception):
                raise ClosedEnvironmentError("`close()` was called by another thread during this call.") from error
            self.close()
            raise

    def _note_done(self, batch: StepBatch) -> None:
        self._driver.note_ended(batch)
        if self._autoreset == Autoreset.DISABLED:
            self._done[batch.env_ids] = batch.terminated | batch.truncated

    def _observations(self, batch: StepBatch) -> Tree:
        """Returns observations for the caller: copied if `copy`, or batched by Gymnasium if they are objects."""
        if self._pool.layout is not None:
            return tree_map(np.copy, batch.obs) if self.copy else batch.obs
        space = self.single_observation_space
        out: Any = create_empty_array(space, len(batch.obs), np.zeros)
        return concatenate(space, list(batch.obs), out)

    def _group(self, group: int) -> NDArray[np.int64]:
        if not 0 <= group < len(self.groups):
            raise ConfigError(
                "A group is named by its number.",
                expected=f"0 to {len(self.groups) - 1}",
                got=group,
                remedy="Make the environment with groups=2 to have two.",
            )
        return self.groups[group]

    def _assert_running(self) -> None:
        if os.getpid() != self._creator:
            raise ClosedEnvironmentError(
                message(
                    "An environment is used by the process that created it.",
                    expected=f"process {self._creator}",
                    got=f"process {os.getpid()}, which was forked from it",
                    remedy="Create the environment after the fork.",
                )
            )
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _assert_pending(self, what: str) -> None:
        self._assert_running()
        if self._pending != what:
            raise NoAsyncCallError(f"Calling `{what}_wait` without any prior call to `{what}_async`.", what)

    def _assert_idle(self, name: str) -> None:
        self._assert_running()
        pending = self._pending or ("send" if self._pending_groups else None)
        if pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{pending}` to complete.", pending
            )
        self._late = False


def _open_local(
    factory: EnvFactory, supervision: Supervision, workers: int | None, preload: Sequence[str], address: str | None
) -> ActingPool:
    """Opens a pool on this machine without Ray: worker processes, or this process if `workers` is 0.

    Raises:
        ConfigError: A setting requires Ray or worker processes.
    """
    if address is not None:
        raise ConfigError(
            "num_nodes=0 steps environments on this machine, without Ray.",
            expected="no address beside num_nodes=0",
            got=f"address={address!r}",
            remedy="Leave address out, or pass num_nodes=1 or more.",
        )
    if workers == 0 and workers is not False:
        if supervision.step_timeout_s is not None:
            raise ConfigError(
                "workers_per_node=0 steps environments in this process, where no step can be stopped.",
                expected="no step_timeout_s beside workers_per_node=0",
                got=f"step_timeout_s={supervision.step_timeout_s:g}",
                remedy="Leave step_timeout_s out, or pass workers_per_node=1 or more.",
            )
        return LocalPool(factory, supervision)
    if workers is not None:
        check_count("workers_per_node", workers)
    num_workers = min(workers or len(os.sched_getaffinity(0)), factory.num_envs)
    return ProcessPool.of(factory, num_workers, preload=preload, supervision=supervision)


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    *,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] | None = None,
    **kwargs: Any,
) -> RayVecEnv:
    """Makes a :class:`RayVecEnv` of a registered environment; mirrors ``gymnasium.make_vec``.

    Args:
        id: Id or spec. The spec of a :class:`RayVecEnv` recreates it, with the same number of environments.
        num_envs: Number of environments.
        vector_kwargs: Arguments of :class:`RayVecEnv`.
        wrappers: Applied to each environment in order.
        **kwargs: Arguments of :class:`RayVecEnv` by name; all others are passed to the environment.

    >>> envs = make_vec("CartPole-v1", num_envs=4, workers_per_node=1, sutton_barto_reward=True)
    >>> envs
    RayVecEnv(CartPole-v1, num_envs=4)
    >>> envs.spec.kwargs["sutton_barto_reward"]
    True
    >>> envs.close()
    """
    ours = {name: kwargs.pop(name) for name in list(kwargs) if name in _KEYWORDS} | dict(vector_kwargs or {})
    env_kwargs: dict[str, Any] = {}
    if isinstance(id, EnvSpec):
        id = deepcopy(id)
        env_kwargs, id.kwargs = id.kwargs, {}  # includes arguments of gymnasium.make only, such as max_episode_steps
        num_envs = env_kwargs.pop("num_envs", num_envs)
        ours = env_kwargs.pop("vector_kwargs", {}) | ours
        wrappers = env_kwargs.pop("wrappers", wrappers)
        env_kwargs.pop("vectorization_mode", None)  # set in specs of gymnasium.make_vec
    env_kwargs |= ours.pop("env_kwargs", {}) | kwargs
    env = RayVecEnv(id, num_envs, env_kwargs=env_kwargs, wrappers=tuple(wrappers or ()), **ours)
    env.spec = deepcopy(env.spec)
    assert env.spec is not None
    env.spec.kwargs.update(env_kwargs)
    for name, value, usual in (("num_envs", num_envs, 1), ("vector_kwargs", ours, {}), ("wrappers", wrappers, None)):
        if value != usual:
            env.spec.kwargs[name] = value
    return env


_KEYWORDS = set(inspect.signature(RayVecEnv.__init__).parameters) - {"self", "env", "num_envs", "wrappers"}
