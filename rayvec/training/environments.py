"""The environments of a run, as its settings ask for them: those of training, of evaluations, and a single one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gymnasium.error import AlreadyPendingCallError

from rayvec.config import TrainConfig
from rayvec.config.references import Reference, is_unnamed, resolve
from rayvec.errors import counted, require
from rayvec.servers.env_servers import EnvServers
from rayvec.training.runs import LEARNERS
from rayvec.vector.env_stats import summary
from rayvec.vector.make_vec import sub_batch_sizes
from rayvec.vector.ray_vec_env import RayVecEnv
from rayvec.wrappers import KeepInfos

logger = logging.getLogger(__name__)
_NO_RESOURCES: dict[str, Any] = {"cores_per_env": None, "gpus_per_env": None, "resources_per_env": {}}


def choose_engine(config: TrainConfig) -> TrainConfig:
    """Returns `config` with ``num_nodes=0`` (this machine, without Ray) where nothing asks for Ray.

    Ray is used if `num_nodes` is 1 or more, an address is given (`config.address` or ``RAY_ADDRESS``), Ray is
    initialised in this process, environments need resources of its nodes, or the learner has nodes of its own.
    """
    is_initialized = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    has_nodes = config.learner_mode == "dedicated"
    asks_for_ray = config.address or os.environ.get("RAY_ADDRESS") or config.resources_per_env
    if config.num_nodes is not None or asks_for_ray or is_initialized or has_nodes:
        return config
    return replace(config, num_nodes=0)


def make_env(config: TrainConfig, num_envs: int | None = None, first_id: int = 0, seed: int | None = None) -> RayVecEnv:
    """Returns the environments of a run; the caller closes them.

    Args:
        config: Settings of the run.
        num_envs: How many of them, where a rank has a part; by default all.
        first_id: Global index of the first of these.
        seed: For what their constructors draw from global random generators; by default the run's own.
    """
    num_envs = num_envs or config.num_envs
    makes: dict[str, Any] = {"env": _entry(config, num_envs, first_id), "env_kwargs": config.env_kwargs}
    if config.native is not None:
        make_native = functools.partial(resolve("native", config.native), **config.env_kwargs)
        sizes = sub_batch_sizes(num_envs, config.num_nodes, config.workers_per_node)
        makes = {"env": [functools.partial(make_native, size) for size in sizes], "native": True}
    reads_infos = config.native is not None or getattr(LEARNERS[type(config)], "reads_infos", True)
    names = (
        "num_nodes",
        "workers_per_node",
        "probe",
        "cores_per_env",
        "gpus_per_env",
        "resources_per_env",
        "groups",
        "step_timeout_s",
        "start_timeout_s",
        "restart_env_every",
        "replay_calls",
        "spare_envs",
    )
    masks = getattr(config, "action_masks", False)
    keep = () if reads_infos else (functools.partial(KeepInfos, names=config.episode_metrics, masks=masks),)
    env = RayVecEnv(
        num_envs=num_envs,
        **{name: getattr(config, name) for name in (*names, "on_env_error", "on_node_loss")} | makes,
        wrappers=[*(resolve("wrappers", name) for name in config.wrappers), *keep],
        preload=_preload(config),
        address=config.address if config.num_nodes != 0 else None,  # then it is the address of the learner's ranks
        first_id=first_id,
        seed=config.seed if seed is None else seed,
    )
    env.interrupted_close_s = 0.0
    try:
        for setting in wrapper_statistics(env, config):  # such as NormalizeObservation
            warnings.warn(
                "A wrapper of the environment keeps running statistics: each environment has its own, and no "
                f"checkpoint contains them, so evaluations begin without. Pass {setting}=True and leave the wrapper "
                "out.",
                UserWarning,
                stacklevel=2,
            )
    except BaseException:
        env.close(terminate=True)
        raise
    return env


def wrapper_statistics(env: Any, config: TrainConfig) -> list[str]:
    """Returns the settings that do what wrappers of the environments do which keep running statistics."""
    settings = {"obs_rms": "normalize_obs", "return_rms": "normalize_reward"}
    return [
        setting
        for attribute, setting in settings.items()
        if config.native is None and all(env.call("has_wrapper_attr", attribute))
    ]


def make_eval_env(config: TrainConfig, *, is_final: bool) -> RayVecEnv:
    """Returns environments for evaluations alone, on this machine; the caller closes them.

    Args:
        config: Settings of the run.
        is_final: Whether training has ended.

    Raises:
        ConfigError: The environments of the run are a list, which has none for evaluations.
    """
    changes: dict[str, Any] = {"num_nodes": 0, "address": None}
    if choose_engine(config).num_nodes != 0:  # what nodes have is not what this machine has
        changes |= {"workers_per_node": None, **_NO_RESOURCES}
    here = replace(eval_settings(config), **changes)
    # a sub-batch of games takes certain numbers of environments only: that of the run fits
    num_envs = config.num_envs if config.native is not None else min(config.num_envs, config.eval_episodes)
    require(
        config.eval_env is not None or not isinstance(environment_of(here), list | tuple),
        "eval_interval_steps was passed with a list of environments, or with servers, which are those of the "
        "training. Pass eval_env=, a class or function that makes environments for evaluations.",
    )
    return make_env(here, num_envs, config.num_envs, seed=config.eval_seed(is_final=is_final))


def eval_settings(config: TrainConfig) -> TrainConfig:
    """Returns the settings of a run with the environment of its evaluations."""
    if config.eval_env is not None and is_unnamed(config.eval_env):
        resolve("eval_env", config.eval_env)  # which says so if it was not passed again
    env_kwargs = {**config.env_kwargs, **config.eval_env_kwargs}
    return replace(config, env_id=config.eval_env or config.env_id, env_kwargs=env_kwargs)


def _entry(config: TrainConfig, num_envs: int, first_id: int) -> Any:
    """Returns what makes these environments of a run; of a list, their part."""
    entry = environment_of(config)
    if isinstance(entry, list | tuple) and len(entry) == config.num_envs:
        entry = entry[first_id % len(entry) :][:num_envs]  # of a rank; of an evaluation, the first ones
    return entry


def _preload(config: TrainConfig) -> tuple[str, ...]:
    needs_torch = any(getattr(config, name, None) is not None for name in ("network", "recurrent"))
    acts_by_torch = needs_torch and config.inference == "worker"
    return (*config.preload, *(("torch",) if acts_by_torch else ()))


def make_one_env(config: TrainConfig, **env_kwargs: Any) -> RayVecEnv:
    """Returns one environment of a run, which this process steps; the caller closes it.

    Args:
        config: Settings of the run.
        env_kwargs: Further arguments of its constructor.
    """
    here: dict[str, Any] = {"num_nodes": 0, "workers_per_node": 0, "address": None, "step_timeout_s": None, "groups": 1}
    kwargs = {**config.env_kwargs, **env_kwargs}
    return make_env(replace(config, **here, **_NO_RESOURCES, env_kwargs=kwargs), 1)


def environment_of(config: TrainConfig) -> Any:
    """Returns the environment of a run in the form that :class:`rayvec.RayVecEnv` takes.

    Raises:
        ConfigError: It was passed in Python, has no name, and was not passed again.
    """
    name = config.env_id
    return resolve("env_id", name) if isinstance(name, Reference) or is_unnamed(name) else name


@contextlib.contextmanager
def served(config: Any, env: Any, *, begun: bool = False) -> Iterator[Any]:
    """Yields `env`, or what makes the environments of the servers that the settings of a run ask for.

    Raises:
        ConfigError: There is another environment too.
    """
    settings = getattr(config, "env_servers", None)
    if not settings:
        yield env
        return
    has_id = not is_unnamed(config.env_id) and (begun or config.env_id != type(config).env_id)
    require(
        env is None and not has_id and config.native is None and not config.env_kwargs,
        "env_servers was passed to a run that has env, env_id, native or env_kwargs too. Servers take the place of all "
        "of them. Leave these out, or pass env_servers={}.",
    )
    wait_s = 0.9 * config.start_timeout_s  # its error says more than that of a worker which takes too long
    with EnvServers(config.num_envs, start_timeout_s=wait_s, **settings) as servers:
        if servers.port:
            waited = counted(config.num_envs, "environment server")
            print(f"rayvec: waiting for {waited} at port {servers.port}", file=sys.stderr)
        yield list(servers)


@contextlib.contextmanager
def open_env(config: TrainConfig, *, trains: bool = False) -> Iterator[RayVecEnv]:
    """Yields the environments of a run on the engine of `choose_engine`, and prints on standard error which it is.

    A Ctrl-C that passes ends the workers at once, even in the middle of a step.

    Args:
        config: Settings of the run.
        trains: Whether to log in the end which environments are slow or were restarted.
    """
    config = choose_engine(config)
    with make_env(config) as env:
        nodes = env.topology.nodes
        num_nodes = len({node.node_id for node in nodes})
        on_ray = f"on Ray (nodes: {num_nodes}, workers: {sum(node.num_workers for node in nodes)})"
        where = "on this machine, without Ray" if config.num_nodes == 0 else on_ray
        print(f"rayvec: {counted(env.num_envs, 'environment')} {where}", file=sys.stderr)
        try:
            yield env
            if trains and not env.closed:
                with contextlib.suppress(AlreadyPendingCallError):  # a run that was stopped collects ahead
                    logger.info(summary(env.env_stats()))
        except KeyboardInterrupt:
            env.close(terminate=True)
            raise
