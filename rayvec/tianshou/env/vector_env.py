"""RayVectorEnv: environments on a cluster or on this machine, as a Tianshou vector environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray
from tianshou.env import BaseVectorEnv

from rayvec.data import objects, tree_map
from rayvec.data.columns import infos_of
from rayvec.data.trees import ArrayLayout, as_slice
from rayvec.envs.factory import EnvFactory, check_env_fns, env_seeds
from rayvec.errors import ConfigError, check_flag
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.fleet.restarts import EnvRules
from rayvec.fleet.spaces import PoolSpaces
from rayvec.tianshou.env.pool_env import PoolEnv, StepResult, observations, step_result
from rayvec.vector.chunks import ChunkAdapter

Ids = int | list[int] | NDArray[Any] | None


def _of_each(name: str, doc: str) -> property:
    """Returns a property: an attribute of each environment, in a list."""
    return property(lambda venv: venv.get_env_attr(name), doc=doc)


class RayVectorEnv(ChunkAdapter, BaseVectorEnv):
    """Environments on every core of a Ray cluster or of this machine, as one Tianshou vector environment.

    It replaces ``tianshou.env.RayVectorEnv``, ``SubprocVectorEnv`` and ``ShmemVectorEnv``: results,
    their order, types and errors are Tianshou's. Environments are made on the workers, never in this process, so only
    the callables must be picklable. As in Tianshou, no cores are claimed from Ray: several vector environments may
    share them, as training and test environments do.

    With `wait_num` or `timeout`, stepping is asynchronous, and every environment has a process of its own. With
    ``workers_per_node=0`` they step in this process and answer all at once.

    Args:
        env_fns: One callable for each environment.
        wait_num: A step returns when this many environments have answered; all of them by default.
        timeout: A step returns after this many seconds with the answers that are there, at least one.
        num_nodes: How many nodes to use; by default all. 0 uses this machine without Ray. A pair lets environments
            move as nodes join and leave, as for :class:`rayvec.RayVecEnv`.
        workers_per_node: Worker processes on each; by default as for :class:`rayvec.RayVecEnv`. With ``num_nodes=0`` it
            may be 0: this process steps the environments one after another, as ``DummyVectorEnv`` does.
        probe: As for :class:`rayvec.RayVecEnv`.
        cores_per_env: As for :class:`rayvec.RayVecEnv`.
        gpus_per_env: As for :class:`rayvec.RayVecEnv`.
        resources_per_env: As for :class:`rayvec.RayVecEnv`.
        step_timeout_s: As for :class:`rayvec.RayVecEnv`.
        start_timeout_s: As for :class:`rayvec.RayVecEnv`.
        on_env_error: As for :class:`rayvec.RayVecEnv`. With ``"restart"``, a step that failed returns the last true
            observation, reward 0, truncated, and ``info["env_restarted"]``. The caller resets, as after any episode.
        restart_env_every: As for :class:`rayvec.RayVecEnv`.
        spare_envs: As for :class:`rayvec.RayVecEnv`.
        on_node_loss: As for :class:`rayvec.RayVecEnv`.
        preload: As for :class:`rayvec.RayVecEnv`; by default what policies of Tianshou need. ``()`` starts faster where
            no policy acts in the workers.
        address: As for :class:`rayvec.RayVecEnv`.

    Raises:
        AssertionError: `wait_num` or `timeout` out of bounds.
        ConfigError: Other settings that can't work, or a cluster that is too small.
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
    """

    # Tianshou's own costs time at every access; the attributes that it serves are properties here.
    __getattribute__ = object.__getattribute__
    num_collectors = 0
    """How many collectors these environments have had."""

    # noinspection PyMissingConstructor
    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        wait_num: int | None = None,
        timeout: float | None = None,
        *,
        num_nodes: int | tuple[int, int] | None = None,
        workers_per_node: int | None = None,
        probe: bool = True,
        cores_per_env: float | None = None,
        gpus_per_env: float | None = None,
        resources_per_env: Mapping[str, float] | None = None,
        step_timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        on_env_error: Literal["raise", "restart"] = "raise",
        restart_env_every: int | None = None,
        spare_envs: Literal[0, 1] = 0,
        on_node_loss: Literal["rehost", "raise"] = "rehost",
        preload: Sequence[str] = ("torch", "tianshou"),
        address: str | None = None,
    ) -> None:
        env_rules = EnvRules.of(on_env_error, step_timeout_s, start_timeout_s, restart_env_every, spare_envs=spare_envs)
        factory = EnvFactory.build(check_env_fns(env_fns), wrappers=(PoolEnv,))
        most = factory.num_envs
        assert 1 <= (wait_num or most) <= most, f"wait_num should be in [1, {most}], but got {wait_num}"
        self.timeout = timeout
        assert timeout is None or timeout > 0, f"timeout is {timeout}, it should be positive if provided!"
        self.is_async = wait_num not in (None, 0, most) or timeout is not None
        self.waiting_id: list[int] = []
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
            worker_per_env=self.is_async,
            claim_cpus=False,
        )
        self.env_num = self._envs.num_envs
        self._tickets: dict[int, Any] = {}  # of environments that are stepping, where stepping is asynchronous
        self.wait_num = wait_num or self.env_num
        self.ready_id = list(range(self.env_num))
        spaces = self._envs.spaces
        self._guarded(self._allocate, _joint_space(spaces), spaces.action)
        self._plain_actions = not isinstance(spaces.action, (gymnasium.spaces.Dict, gymnasium.spaces.Tuple))

    is_closed = property(lambda self: self.closed, doc="Whether the environments are closed.")
    action_space = _of_each("action_space", "The space of each environment's actions.")
    observation_space = _of_each("observation_space", "The space of each environment's observations.")
    metadata = _of_each("metadata", "The metadata of each environment.")
    spec = _of_each("spec", "The spec of each environment.")
    reward_range = _of_each("reward_range", "The range of each environment's rewards, which Gymnasium no longer has.")

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """Returns an attribute of some environments, each from the outermost wrapper that has it.

        Raises:
            AttributeError: An environment does not have it.
            AssertionError: One of them is stepping.
        """
        return self._call("get_env_attr", key, id=id)

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Sets an attribute of some environments, within all wrappers."""
        self._call("set_env_attr", key, value, id=id)

    def _call(self, name: str, *args: Any, id: Ids = None, **kwargs: Any) -> list[Any]:
        rows = self._pool_ids(self._free_ids(id))
        return list(self._run(Command(Op.CALL, rows, rest=(name, args, kwargs))).value)

    def reset(self, env_id: Ids = None, **kwargs: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Resets some environments, all with the same arguments.

        Args:
            env_id: Which environments; all by default.
            **kwargs: Passed to ``reset`` of each environment: ``seed``, ``options``, or what it takes.

        Returns:
            Observations and infos in the order of `env_id`.

        Raises:
            TypeError: Observations are tuples, which Tianshou does not take.
            AssertionError: One of them is stepping.
        """
        ids = self._free_ids(env_id)
        if len(ids) == 0:
            raise IndexError("The list of ids is empty. Pass at least one id, or None for all environments.")
        rows = self._pool_ids(ids)
        seeds: Sequence[int | None] = [None] * len(ids)
        given = kwargs.get("seed")
        if given is None or isinstance(given, Integral):
            kwargs.pop("seed", None)
            seeds = [given if given is None else int(given)] * len(ids)
        options = {"kwargs": kwargs} if kwargs else None
        infos = self._exchange(Command(Op.RESET, rows, rest=(seeds, options)))
        return observations(self._envs.arrays, as_slice(rows), len(ids), of_reset=True), objects(infos)

    def step(self, action: Any, id: Ids = None) -> StepResult:
        """Steps some environments.

        Args:
            action: One action for each; NumPy arrays are sent as they are, lists and tensors more slowly. Where
                stepping is asynchronous, None starts nothing.
            id: Which environments, each once, in any order; all by default.

        Returns:
            Observations, rewards, terminated, truncated and infos with ``env_id``: in the order of `id`, or, where
            stepping is asynchronous, of those that have answered.

        Raises:
            AssertionError: One of them is stepping, or there are more or fewer actions than environments.
            ValueError: No action, and stepping is not asynchronous.
        """
        self._assert_idle()
        ids = self._wrap_id(id)
        if not self.is_async:
            if action is None:
                raise ValueError("action must be not-None for non-async")
            if len(ids) == 0:
                raise ValueError("The list of ids is empty. Pass at least one id, or None for all environments.")
            pool_ids, actions = self._checked(action, ids)
            infos = self._exchange(Command(Op.STEP, pool_ids, actions, Autoreset.DISABLED))
            return step_result(self._envs.arrays, infos, as_slice(pool_ids), ids)
        if action is not None:
            self._assert_id(ids)
            pool_ids, actions = self._checked(action, ids)
            self._guarded(self._post_each, pool_ids, actions)
            self.waiting_id += list(ids)
            self.ready_id = [x for x in self.ready_id if x not in ids]
        return self._step_async()

    def _checked(self, action: Any, ids: list[int] | NDArray[Any]) -> tuple[NDArray[np.int64], Any]:
        """Returns the pool's ids, and actions in a form that it takes."""
        assert len(action) == len(ids)
        pool_ids = self._pool_ids(ids)
        if hasattr(action, "detach"):
            action = action.detach().cpu().numpy()
        if not (self._plain_actions and type(action) is np.ndarray and action.dtype != object):
            action = objects([action[i] for i in range(len(ids))])
        return pool_ids, action

    def _post_each(self, ids: NDArray[np.int64], actions: Any) -> None:
        """Starts a step of each environment by itself."""
        for place, env_id in enumerate(ids.tolist()):
            own = tree_map(lambda leaf, at=place: leaf[at : at + 1], actions)
            self._tickets[env_id] = self._post(Command(Op.STEP, ids[place : place + 1], own, Autoreset.DISABLED))

    def _step_async(self) -> StepResult:
        if not self.waiting_id:
            raise RuntimeError("No environment is stepping, and no actions were passed. Look at waiting_id first.")
        answered = self._guarded(self._take_some)
        ids = [self.waiting_id.pop(self.waiting_id.index(env_id)) for env_id in answered]
        self.ready_id += ids
        return step_result(self._envs.arrays, list(answered.values()), np.array(ids), ids)

    def _take_some(self) -> dict[int, dict[str, Any]]:
        """Waits for `wait_num` environments, or until the timeout for at least one. Returns their infos."""
        ids, tickets = list(self._tickets), list(self._tickets.values())
        count = min(self.wait_num, len(ids))
        found = self._envs.wait_some(tickets, count, self.timeout or math.inf) or self._envs.wait_some(tickets)
        answered = sorted(ids[index] for index in found)
        columns = {env_id: self._accepted(self._envs.take(self._tickets.pop(env_id))).infos for env_id in answered}
        return {env_id: infos_of(infos, [env_id])[0] for env_id, infos in columns.items()}

    def seed(self, seed: int | list[int] | None = None) -> list[Any]:
        """Seeds the action space and the random numbers of each environment, which resets it.

        Args:
            seed: A base, to which each environment's index is added; a list with one for each; or None.

        Returns:
            The seed that each environment was reset with, in a list.
        """
        self._assert_idle()
        self._assert_id(self._wrap_id(None))
        seeds = env_seeds(seed, self.env_num)
        self._exchange(Command(Op.RESET, self._everyone, rest=(seeds, {"seed": True})))
        return [[each] for each in seeds]

    def render(self, **kwargs: Any) -> list[Any]:
        """Returns what each environment renders.

        Raises:
            RuntimeError: An environment is stepping.
        """
        self._assert_is_not_closed()
        if self.waiting_id:
            raise RuntimeError(f"Environments {self.waiting_id} are still stepping, cannot render them now.")
        return self._call("render_env", **kwargs)

    def close(self) -> None:
        """Closes the environments, ends the workers and actors, and the Ray that was started for them.

        Raises:
            AssertionError: It has been called before.
        """
        if self.closed and self._closed_by is not None:  # by a call that failed: a `finally` may close it again
            return
        super()._assert_is_not_closed()
        self._close_envs()

    @property
    def takes_chunks(self) -> bool:
        """Whether chunks of the environments are what `step` and `reset` would return."""
        is_plain = (type(self).step, type(self).reset) == (RayVectorEnv.step, RayVectorEnv.reset)
        return is_plain and not self.is_async and not self._envs.layout.objects

    # What the public methods share.

    def _assert_is_not_closed(self) -> None:
        self._assert_same_process()
        assert not self.is_closed, f"Methods of {type(self).__name__} cannot be called after close.{self._why_closed()}"

    _assert_running = _assert_is_not_closed

    def _assert_idle(self, name: str = "") -> None:
        self._assert_is_not_closed()
        is_free = not self._pending or name == "publish"
        assert is_free, "Cannot interact with environments that take a chunk for a prefetching collector."

    def _exchange(self, command: Command) -> list[dict[str, Any]]:
        """Executes a step or a reset of some environments. Returns their infos."""
        return infos_of(self._run(command).infos, command.rows.tolist())

    def _free_ids(self, id: Ids) -> list[int] | NDArray[Any]:
        """Returns ids of environments that are not stepping."""
        self._assert_idle()
        ids = self._wrap_id(id)
        if self.is_async:
            self._assert_id(ids)
        return ids

    def _pool_ids(self, ids: list[int] | NDArray[Any]) -> NDArray[np.int64]:
        """Returns the pool's ids; as in a list, -1 is the last environment."""
        pool_ids = np.asarray(ids, np.int64)
        if len(pool_ids) and not -self.env_num <= pool_ids.min() <= pool_ids.max() < self.env_num:
            raise IndexError(f"The ids are {pool_ids.tolist()}. They go from 0 to {self.env_num - 1}.")
        pool_ids = pool_ids % self.env_num
        if len(set(pool_ids.tolist())) < len(pool_ids):
            raise ConfigError(
                f"The ids are {pool_ids.tolist()}. Pass each id once, and make a call for each repetition."
            )
        return pool_ids


class RayVectorEnvType:
    """A ``VectorEnvType`` for Tianshou's high-level builder that makes :class:`RayVectorEnv`.

    Args:
        **options: Keywords of :class:`RayVectorEnv`. By default `preload` lets each node import the modules of the
            builder's factories once, rather than every worker.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def create_venv(self, factories: Sequence[Callable[[], gymnasium.Env[Any, Any]]]) -> RayVectorEnv:
        """Makes a vector environment with one environment of each factory."""
        return RayVectorEnv(factories, **({"preload": ("tianshou.highlevel.env",)} | self._options))


def _joint_space(spaces: PoolSpaces) -> gymnasium.Space[Any]:
    """Returns a space whose arrays hold the observations of every environment, or a space of any objects."""
    every = spaces.observations
    have_objects = any(ArrayLayout.of(each).objects for each in every)
    if every and (have_objects or spaces.misfit(spaces.observation) is not None):
        return gymnasium.Space()
    return spaces.observation
