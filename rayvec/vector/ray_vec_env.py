"""The Gymnasium adapter: environments on every core of a machine or a Ray cluster, as one vector environment."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from rayvec.data import Chunk, StepBatch, Tree
from rayvec.data.columns import Columns, select, settle
from rayvec.data.topology import split_groups
from rayvec.data.trees import as_batch, as_slice
from rayvec.envs.factory import EnvFactory, env_seeds
from rayvec.errors import ConfigError, check_choice, check_flag
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.fleet.restarts import EnvRules, EpisodeState
from rayvec.policies.policy import Policy
from rayvec.vector.batching import (
    batched_observations,
    checked_actions,
    checked_mask,
    in_batch_order,
)
from rayvec.vector.chunks import ChunkAdapter, WeightStore


class RayVecEnv(ChunkAdapter, VectorEnv[Any, Any, NDArray[Any]]):
    """Environments on every core of a Ray cluster, as one Gymnasium vector environment.

    It returns bit for bit what ``gymnasium.vector.SyncVectorEnv`` returns for the same seeds and actions, on
    whatever nodes and workers. If Ray is initialised, that Ray is used and left as it is. Otherwise it connects to
    ``address`` or to ``RAY_ADDRESS``, or else starts a private local cluster.

    Args:
        env: An id, a spec, a class or function that makes an environment (or its name, ``"module:Class"``), or a list
            of one callable for each environment; they are called on the workers. If the class or function has a
            parameter ``env_index``, it gets the index of the environment, for a port or a folder of its own.
        num_envs: How many environments; with a list it may be left out. It need not be divisible by
            the number of workers.
        env_kwargs: Passed to ``gymnasium.make``, or to the class or function; "{env_index}" in a string is replaced.
        wrappers: Applied to each environment in order.
        copy: Whether observations are copies, or views that the next step overwrites.
        autoreset_mode: When an environment is reset whose episode has ended: by default in the next step, and with
            ``native=True`` as the sub-batches say.
        observation_mode: ``"same"``, ``"different"`` (other bounds), or a pair of the batched and the single space.
        num_nodes: How many nodes to use; by default all that have free cores. 0 uses this machine without Ray. A pair,
            the least and the greatest number, lets environments move as nodes join and leave: see docs/clusters.md.
        workers_per_node: Worker processes on each node. By default one for each core, with Ray one for each free core;
            but one for each environment, up to 256 on a node, if its steps wait: see docs/slow-simulators.md. With
            ``num_nodes=0`` it may be 0: this process steps the environments one after another, for debuggers and for
            environments whose step takes microseconds; ``step_timeout_s`` is an error then.
        probe: Whether to find out if steps wait, where there are more environments than cores and `workers_per_node` is
            not given: by one environment more, which is made, stepped for at most 0.3 s, and closed before the others.
        cores_per_env: Cores that each environment needs. With Ray they are claimed; see docs/slow-simulators.md for
            this and the next two.
        gpus_per_env: A share of a GPU, or a whole number of GPUs, that each environment needs, and alone sees.
        resources_per_env: Resources of Ray's nodes that each environment claims, such as ``{"license": 1}``.
        groups: 1, or 2 so that the policy acts on one half while the other half steps.
        step_timeout_s: Seconds that a worker may take for one step of its environments, also within a chunk, for a
            reset or a call, before it is killed. By default there is no limit.
        start_timeout_s: The same to make its environments, or to load a policy. The error shows where it hung.
        on_env_error: What happens to an environment that raises, and to those of a worker that dies or hangs.
            ``"raise"`` closes all environments. ``"restart"`` restarts the affected ones; the others continue. A
            failed step returns the last true observation, reward 0, truncated, and ``info["env_restarted"]``.
        restart_env_every: After how many finished episodes an environment is closed and made again, for simulators that
            leak. Its next episode has a seed of its own, as after a failure, unless :meth:`reset` passes one. Native
            sub-batches do not support it.
        replay_calls: Names of methods and attributes, such as ``("set_difficulty",)``: where an environment is made
            again, the last :meth:`call` and the last :meth:`set_attr` of each name is repeated before its reset.
        spare_envs: 1 lets each worker keep one environment more, for slow resets. A thread resets it ahead, and it
            takes the place of one whose episode has ended. Which environment plays which episode then depends on the
            number of workers: see docs/slow-simulators.md.
        on_node_loss: ``"rehost"`` restarts environments of a lost node on others; ``"raise"`` is a ``NodeLostError``.
        preload: Modules that the workers import once for each node, such as ``("torch",)``. A module that starts a
            thread is refused. Workers share random generators and files that it opens: see docs/own-environment.md.
        address: Of a running Ray cluster.
        first_id: Global index of the first environment, where several processes have parts of one set of environments.
            Noise and errors go by it. Requires ``num_nodes=0``.
        native: Whether each callable makes a ``gymnasium.vector.VectorEnv``, a native sub-batch (docs/vector-env.md).
        seed: Of the global random generators while workers make environments; :meth:`reset` seeds them again.

    Raises:
        ConfigError: Settings that can't work, or a cluster without the cores for them.
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
    """

    def __init__(
        self,
        env: str | EnvSpec | Callable[..., gymnasium.Env[Any, Any]] | Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        num_envs: int | None = None,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Callable[[Any], Any]] = (),
        copy: bool = True,
        autoreset_mode: str | AutoresetMode | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        num_nodes: int | tuple[int, int] | None = None,
        workers_per_node: int | None = None,
        probe: bool = True,
        cores_per_env: float | None = None,
        gpus_per_env: float | None = None,
        resources_per_env: Mapping[str, float] | None = None,
        groups: Literal[1, 2] = 1,
        step_timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        on_env_error: Literal["raise", "restart"] = "raise",
        restart_env_every: int | None = None,
        replay_calls: Sequence[str] = (),
        spare_envs: Literal[0, 1] = 0,
        on_node_loss: Literal["rehost", "raise"] = "rehost",
        preload: Sequence[str] = (),
        address: str | None = None,
        first_id: int = 0,
        native: bool = False,
        seed: int | None = None,
    ) -> None:
        check_choice("groups", groups, (1, 2))
        env_rules = EnvRules.of(
            on_env_error, step_timeout_s, start_timeout_s, restart_env_every, replay_calls, spare_envs
        )
        factory = EnvFactory.build(env, num_envs, env_kwargs, wrappers, native=native, seed=seed, first_id=first_id)
        self.spec = factory.spec
        self.copy = check_flag("copy", copy)
        modes = tuple(each.value for each in AutoresetMode)
        check_choice("autoreset_mode", getattr(autoreset_mode, "value", autoreset_mode), (None, *modes))
        mode = None if autoreset_mode is None else AutoresetMode(autoreset_mode)
        self._open(
            factory,
            num_nodes=num_nodes,
            workers_per_node=workers_per_node,
            probe=check_flag("probe", probe),
            cores_per_env=cores_per_env,
            gpus_per_env=gpus_per_env,
            resources_per_env=resources_per_env,
            env_rules=env_rules,
            on_node_loss=on_node_loss,
            preload=preload,
            address=address,
            first_id=first_id,
        )
        self._guarded(self._set_up, num_envs, mode, observation_mode, groups)
        self._chunk_steps, self._noise_seed = 0, secrets.randbits(63)
        self._sent: tuple[Any, WeightStore, Any] | None = None  # the policy of `rollout`, and the weights it had loaded

    def _set_up(
        self,
        num_envs: int | None,
        mode: AutoresetMode | None,
        observation_mode: str | tuple[Space[Any], Space[Any]],
        groups: Literal[1, 2],
    ) -> None:
        """Checks the environments that were made, and allocates the arrays."""
        spaces = self._envs.spaces
        spaces.check_native(num_envs, mode)
        self.num_envs = self._envs.num_envs
        given = Autoreset[(mode or AutoresetMode.NEXT_STEP).name]
        self._autoreset = given if spaces.native_mode is None else spaces.native_mode
        self._is_native = spaces.native_mode is not None
        self._is_reset_by_caller = self._autoreset == Autoreset.DISABLED
        self.autoreset_mode = AutoresetMode[self._autoreset.name]
        self.metadata = {**spaces.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = spaces.render_mode
        self.single_action_space = spaces.action
        self.action_space = batch_space(spaces.action, self.num_envs)
        self.observation_space, self.single_observation_space = batched_observations(
            spaces, observation_mode, self.num_envs
        )
        self.groups = split_groups(self.topology, groups, spaces.unit_bounds)
        for ids in self.groups:
            ids.flags.writeable = False  # what follows from the rows of a command is remembered by their array
        action = in_batch_order(spaces.action, self.action_space)
        self._allocate(self.single_observation_space, action, self.groups)
        self._action_shape = None if self._envs.action_layout.objects else spaces.action.shape

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
        """Resets environments, all of them or those that ``options["reset_mask"]`` (``bool [N]``) names.

        Args:
            seed: A base, to which each environment's index is added; a list of N; or None.
            options: Passed to each environment, without the mask.

        Returns:
            The observation of every environment, and the infos of those that were reset.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Starts what :meth:`reset` does; :meth:`reset_wait` returns its result."""
        seeds = env_seeds(seed, self.num_envs)
        options = None if options is None else dict(options)
        ids = self._everyone
        if options and "reset_mask" in options:
            ids = np.flatnonzero(checked_mask(options.pop("reset_mask"), self.num_envs, is_first=not self.num_uses))
        self._start("reset", Command(Op.RESET, ids, rest=([seeds[i] for i in ids.tolist()], options)))
        self._done[ids] = False
        if isinstance(seed, int | np.integer):
            self._chunk_steps, self._noise_seed = 0, int(seed)

    def reset_wait(self, timeout: float | None = None) -> tuple[Tree, dict[str, Any]]:
        """Waits for :meth:`reset_async`, for up to `timeout` seconds.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: It takes longer; it stays pending.
        """
        infos = self._wait("reset", timeout).infos
        return self._observations(slice(None)), self._settled(infos)

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
        """Starts what :meth:`step` does; :meth:`step_wait` returns its result."""
        self._send("step", self._everyone, actions)

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Tree, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Waits for :meth:`step_async`, for up to `timeout` seconds.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: It takes longer; it stays pending.
        """
        return self._stepped(self._everyone, slice(None), self._wait("step", timeout).infos)

    def send(self, actions: Any, group: int = 0) -> None:
        """Starts a step of one group, whose environments are ``groups[group]``.

        Args:
            actions: Tree of ``[k, *act_shape]`` in the order of the group.
            group: Which; several may be pending, each once.
        """
        self._send("send", self._group(group), actions, group)

    def recv(self, group: int = 0, timeout: float | None = None) -> StepBatch:
        """Waits for the step of one group.

        Returns:
            The answers in the order of ``groups[group]``; `info` is merged, with rows of the group.
        """
        ids = self._group(group)
        infos = select(self._wait("send", timeout, group).infos, ids)
        return StepBatch(ids.copy(), *self._stepped(ids, as_slice(ids), infos))

    def rollout(
        self,
        policy: Any,
        num_steps: int,
        inference: Literal["worker", "driver", "node"] = "worker",
        seed: int | None = None,
    ) -> Chunk:
        """Lets a policy take steps of every environment, without contacting the driver between steps.

        Environments are reset within the step that ends their episode, whatever `autoreset_mode` is.

        Args:
            policy: A callable from observations to actions, or a :class:`rayvec.Policy`. If the workers have
                this policy already, they get only the weights that it has loaded since, and no other change.
            num_steps: T.
            inference: Where the policy acts: ``"worker"``, in every worker over its own slice; ``"node"``, in the
                process that owns the workers of a node (with ``num_nodes=0`` this one), over all of them in two groups,
                of which one steps while the policy acts on the other; ``"driver"``, in this process, step by step.
            seed: Resets all environments first, with base + index, and is the seed of the noise, as a call of
                :meth:`reset` with one int is; without either, the noise can't be repeated. Only :meth:`reset` returns
                the infos of that reset.
        """
        self._assert_idle("rollout")
        check_choice("inference", inference, ("worker", "driver", "node"))
        if seed is not None:
            self.reset_async(seed)
            self._wait("reset")
        store = self._store_of(policy, inference)
        self.rollout_async(store, num_steps, self._chunk_steps, self._noise_seed)
        taken = self.rollout_wait()
        self._chunk_steps += num_steps
        return taken.chunk

    def _store_of(self, policy: Any, inference: Literal["worker", "driver", "node"]) -> WeightStore:
        """Sends what the workers lack of a policy: all of it, or only the weights that it has loaded since.

        Hidden states stay in the workers where only weights are sent. A subclass of :class:`rayvec.Policy` that
        overrides `load_weights` is sent again as a whole: the workers' copy would change the weights a second time.
        """
        if inference == "driver":
            return self.publish(policy, inference=inference)
        loaded: Any = policy.loaded_weights if isinstance(policy, Policy) else None
        may_load = getattr(type(policy), "load_weights", None) is Policy.load_weights
        sent, store, had_loaded = self._sent or (None, None, None)
        is_known = sent is policy and store is not None and store.inference == inference
        if store is not None and is_known and loaded is not had_loaded and may_load:
            store.publish(loaded)
        elif store is None or not is_known or loaded is not had_loaded:
            self._sent = None
            if store is not None:
                store.drop()
            store = self.publish(policy, inference=inference)
        self._sent = policy, store, loaded
        return store

    def get_states(self) -> list[Any] | None:
        """Returns what :meth:`set_states` needs to continue each episode, here or in other environments like these.

        Environments offer it by the methods ``get_state()`` and ``set_state(state)``, or by the wrapper
        :class:`rayvec.wrappers.SaveState`. If one of them does not, it returns None.

        Raises:
            Exception: What an environment raised, which then has not changed.
        """
        self._assert_idle("get_states")
        states: list[Any] = self._run(Command(Op.GET_STATE, self._everyone)).value
        return None if any(state is None for state in states) else states

    def set_states(self, states: Sequence[Any]) -> None:
        """Lets every environment continue the episode of a state that :meth:`get_states` has returned.

        An environment whose ``set_state`` raises is restarted, and that episode is cut.
        """
        self._assert_idle("set_states")
        if len(states) != self.num_envs:
            raise ConfigError(
                f"set_states was called with {len(states)} states for {self.num_envs} environments. Pass one for each."
            )
        self._run(Command(Op.SET_STATE, self._everyone, rest=(list(states), None)))
        self._done[:] = self._envs.arrays["episode"] == EpisodeState.ENDED

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each environment, or gets an attribute; returns the results in their order.

        What a method raises is raised here, and the environments stay open.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Starts what :meth:`call` does; :meth:`call_wait` returns its result."""
        self._start("call", Command(Op.CALL, self._everyone, rest=(name, args, kwargs)))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits for :meth:`call_async`, for up to `timeout` seconds."""
        return tuple(self._wait("call", timeout).value)

    def render(self) -> tuple[Any, ...]:
        """Returns what each environment renders."""
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
                f"set_attr was called with {len(values)} values for {self.num_envs} environments. Pass one "
                "for each, or one value that is no list or tuple for all."
            )
        self._run(Command(Op.SET, self._everyone, rest=(name, list(values))))

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the environments, ends the workers and actors, and the Ray that was started for them.

        It does not wait for a pending call, and warns if that was ``reset_async``, ``step_async`` or ``call_async``.

        Args:
            timeout: Seconds in which the environments may complete their step and close, 10 by default. After that,
                their workers are killed.
            terminate: Whether they are killed at once, without being closed.
        """
        pending = self._pending
        self._close_envs(0.0 if terminate else timeout)
        if pending in ("reset", "step", "call"):
            gymnasium.logger.warn(f"Calling `close` while waiting for a pending call to `{pending}` to complete.")

    # What the public methods share.

    def _send(self, name: str, ids: NDArray[np.int64], actions: Any, group: int = 0) -> None:
        if self._is_reset_by_caller:
            assert not self._done[ids].any(), f"environments {ids[self._done[ids]].tolist()} must be reset first"
        shape = self._action_shape
        if shape is None or type(actions) is not np.ndarray or actions.shape != (len(ids), *shape):
            actions = checked_actions(actions, self._envs.action_layout, len(ids), self.single_action_space)
        self._start(name, Command(Op.STEP, ids, actions, self._autoreset), group)

    def _stepped(self, ids: NDArray[np.int64], rows: Any, infos: Columns) -> tuple[Any, ...]:
        """Returns observations, rewards, terminated, truncated and infos as the caller gets them."""
        arrays = self._envs.arrays
        rew, terminated, truncated = (arrays[name][rows].copy() for name in ("rew", "terminated", "truncated"))
        if self._is_reset_by_caller:
            self._done[ids] = terminated | truncated
        return self._observations(rows), rew, terminated, truncated, self._settled(infos)

    def _observations(self, rows: Any) -> Tree:
        """Observations as the caller gets them: copied, or, where they are no arrays, batched by Gymnasium."""
        return as_batch(self._envs.arrays["obs"], rows, copy=self.copy)

    def _settled(self, infos: Columns) -> Columns:
        """Returns infos as Gymnasium's own vector environments do."""
        return settle(infos, common=self._is_native) if infos else {}

    def _group(self, group: int) -> NDArray[np.int64]:
        if not 0 <= group < len(self.groups):
            raise ConfigError(f"There is no group {group}. There are the groups 0 to {len(self.groups) - 1}.")
        return self.groups[group]
