"""RayVecEnv: environments on a cluster or on this machine, as a vector environment of Stable-Baselines3."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rayvec.data import objects, tree_map
from rayvec.data.columns import infos_of, unwrapped
from rayvec.envs.factory import EnvFactory, check_env_fns, env_seeds
from rayvec.errors import ConfigError, check_flag, require
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.fleet.restarts import RESTARTED, EnvRules
from rayvec.fleet.spaces import PoolSpaces
from rayvec.stable_baselines3.worker_env import WorkerEnv
from rayvec.vector.adapter import Adapter
from rayvec.vector.batching import check_number, check_spaces

Indices = int | Iterable[int] | None


class RayVecEnv(Adapter, VecEnv):
    """Environments on every core of a Ray cluster or of this machine, as one Stable-Baselines3 vector environment.

    It replaces ``SubprocVecEnv`` and ``DummyVecEnv``: observations, infos and errors are theirs, and rewards are
    ``float32 [N]``, as those of ``DummyVecEnv``. Environments are made on the workers, so only the callables must be
    picklable. No cores are claimed from Ray: training and evaluation environments may share them.

    Args:
        env_fns: One callable for each environment.
        num_nodes: How many nodes to use; by default all. 0 uses this machine without Ray. A pair lets environments
            move as nodes join and leave, as for :class:`rayvec.RayVecEnv`.
        workers_per_node: Worker processes on each; by default as for :class:`rayvec.RayVecEnv`. With ``num_nodes=0`` it
            may be 0: this process steps the environments one after another, as ``DummyVecEnv`` does.
        probe: As for :class:`rayvec.RayVecEnv`.
        cores_per_env: As for :class:`rayvec.RayVecEnv`.
        gpus_per_env: As for :class:`rayvec.RayVecEnv`.
        resources_per_env: As for :class:`rayvec.RayVecEnv`.
        step_timeout_s: As for :class:`rayvec.RayVecEnv`.
        start_timeout_s: As for :class:`rayvec.RayVecEnv`.
        on_env_error: As for :class:`rayvec.RayVecEnv`. With ``"restart"``, a step that failed ends the episode: reward
            0, ``info["TimeLimit.truncated"]``, ``info["env_restarted"]``, and the last true observation in
            ``info["terminal_observation"]``. The observation is the first of the restarted environment.
        restart_env_every: As for :class:`rayvec.RayVecEnv`.
        spare_envs: As for :class:`rayvec.RayVecEnv`.
        on_node_loss: As for :class:`rayvec.RayVecEnv`.
        preload: As for :class:`rayvec.RayVecEnv`. ``("stable_baselines3",)`` where the callables use its wrappers.
        address: As for :class:`rayvec.RayVecEnv`.

    Raises:
        ConfigError: Settings that can't work, observations that no array holds, two callables that return the same
            environment, or a cluster that is too small.
        RuntimeError: The environments' spaces differ.
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
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
        preload: Sequence[str] = (),
        address: str | None = None,
    ) -> None:
        env_rules = EnvRules.of(on_env_error, step_timeout_s, start_timeout_s, restart_env_every, spare_envs=spare_envs)
        factory = EnvFactory.build(check_env_fns(env_fns), wrappers=(WorkerEnv,))
        self._everyone = np.arange(factory.num_envs)
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
            claim_cpus=False,
        )
        found = self._envs.spaces
        self._guarded(self._set_up, found)
        self._plain_actions = not isinstance(found.action, (spaces.Dict, spaces.Tuple))
        super().__init__(factory.num_envs, found.observation, found.action)
        self.metadata = dict(found.metadata)  # VecVideoRecorder reads the frames per second here

    def _set_up(self, found: PoolSpaces) -> None:
        """Checks the environments and allocates the arrays."""
        check_spaces(found, "different", found.observation)
        self._envs.allocate(found.observation, found.action)
        require(
            not self._envs.layout.objects,
            f"The observation space is {found.observation}. Stable-Baselines3 accepts Box, Discrete, "
            "MultiDiscrete and MultiBinary, and a Dict or Tuple of them: convert observations by a wrapper.",
        )

    def reset(self) -> Any:
        """Resets all environments, with the seeds and options that were set since the last reset.

        A step that is pending is waited for, and its result is dropped.

        Returns:
            Observations, tree of ``[N, *obs_shape]``. :attr:`reset_infos` holds the infos.
        """
        if self._pending == "step":
            self._wait("step")
        self._assert_idle("reset")
        seeds, same = env_seeds(self._seeds, self.num_envs), dict[int, list[int]]()
        for env_id, options in enumerate(self._options):  # one dict for all, or many: of equal options without any
            same.setdefault(id(options) if options else 0, []).append(env_id)
        self.reset_infos = [{} for _ in range(self.num_envs)]
        for members in same.values():
            rest = [seeds[i] for i in members], self._options[members[0]] or None
            infos = self._run(Command(Op.RESET, np.array(members), rest=rest)).infos
            for env_id, info in zip(members, infos_of(infos, members), strict=True):
                self.reset_infos[env_id] = info
        self._reset_seeds()
        self._reset_options()
        return tree_map(np.copy, self._envs.arrays["obs"])

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Sets the options of the next reset: one dict for all environments, or a list with one for each."""
        if isinstance(options, Sequence) and len(options) != self.num_envs:
            raise ConfigError(
                f"The list of options has {len(options)} entries for {self.num_envs} environments. Pass one dict "
                "for all of them, or a list with one for each."
            )
        super().set_options(options)

    def step_async(self, actions: Any) -> None:
        """Starts a step of every environment; :meth:`step_wait` returns its result.

        Args:
            actions: One action for each environment: an array ``[N, *act_shape]``, or a list.
        """
        self._assert_idle("step")
        check_number(len(actions), self.num_envs, self.action_space)
        if not (self._plain_actions and type(actions) is np.ndarray and actions.dtype != object):
            actions = objects([actions[i] for i in range(self.num_envs)])
        self._start("step", Command(Op.STEP, self._everyone, actions, Autoreset.SAME_STEP))

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Waits for :meth:`step_async`.

        Returns:
            Observations, tree of ``[N, *obs_shape]``; rewards, ``float32 [N]``; whether an episode ended, ``bool [N]``;
            infos. Where an episode ended, the observation is the first of the next one, the info holds the last one
            (``terminal_observation``), and :attr:`reset_infos` the info of the reset.

        Raises:
            NoAsyncCallError: Nothing was started.
        """
        infos = infos_of(self._wait("step").infos, range(self.num_envs))
        arrays = self._envs.arrays
        terminated, truncated = arrays["terminated"], arrays["truncated"]
        done, cuts = terminated | truncated, (truncated & ~terminated).tolist()
        for env_id, (info, has_ended, cut) in enumerate(zip(infos, done.tolist(), cuts, strict=True)):
            if has_ended:
                final_obs, final_info = info.pop("final_obs"), info.pop("final_info")
                self.reset_infos[env_id] = {key: each for key, each in info.items() if (key, each) != (RESTARTED, True)}
                infos[env_id] = info = unwrapped(final_info)
            info["TimeLimit.truncated"] = cut
            if has_ended:
                info["terminal_observation"] = final_obs
        obs = tree_map(np.copy, arrays["obs"])
        return obs, arrays["rew"].astype(np.float32), done, infos

    def close(self) -> None:
        """Closes the environments, ends the workers and actors, and the Ray that was started for them."""
        if not self.closed:
            self._close_envs()

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Returns an attribute of some environments, each from the outermost wrapper that has it.

        Raises:
            AttributeError: An environment does not have it.
        """
        return self._call("get_env_attr", (attr_name,), indices)

    def has_attr(self, attr_name: str) -> bool:
        """Returns whether all environments have an attribute."""
        return all(self._call("has_env_attr", (attr_name,), None))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets an attribute of the outermost wrapper of some environments, all to the same value."""
        self._call("set_env_attr", (attr_name, value), indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of some environments; returns the results."""
        return self._call("call_env", (method_name, method_args, method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Returns whether environments have a wrapper of a class."""
        return self._call("is_env_wrapped", (wrapper_class,), indices)

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """Returns what each environment renders, where its render mode is ``"rgb_array"``; else warns."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.env_method("render")

    def _call(self, name: str, args: tuple[Any, ...], indices: Indices) -> list[Any]:
        self._assert_idle(name)
        listed = list(indices) if isinstance(indices, Iterable) else indices
        ids = self._everyone if listed is None else self._everyone[np.atleast_1d(np.array(listed, np.int64))]
        is_once = len(set(ids.tolist())) == len(ids)  # an environment that is named twice is called twice
        commands = [Command(Op.CALL, rows, rest=(name, args, {})) for rows in ([ids] if is_once else ids[:, None])]
        return [value for command in commands if len(ids) for value in self._run(command).value]
