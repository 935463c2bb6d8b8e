"""What a run is made of: the environments and the learner that its settings ask for.

Learners are found by the class of their settings. `register` adds an algorithm.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from rayvec.config import CONFIGS, IMPALAConfig, PPOConfig, SACConfig, TrainConfig
from rayvec.errors import ConfigError
from rayvec.learners.base import Learner
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.sac import SACLearner
from rayvec.vector.make_vec import sub_batch_sizes
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = [
    "LEARNERS",
    "choose_engine",
    "make_env",
    "make_learner",
    "open_env",
    "open_learner",
    "register",
    "torch_threads",
    "wait_limit_s",
]

LEARNERS: dict[type[TrainConfig], Callable[..., Learner]] = {
    PPOConfig: PPOLearner,
    SACConfig: SACLearner,
    IMPALAConfig: IMPALALearner,
}
"""Learners by the class of their settings; each is called with the spaces of one environment and the settings."""

_WAIT_S, _COMPILING_S = 60.0, 300.0
"""How long ranks wait for each other; a rank that compiles for another shape takes half a minute and more."""


def register(config_class: type[TrainConfig], learner: Callable[..., Learner]) -> None:
    """Adds an algorithm: from now on :func:`rayvec.train` takes settings of this class.

    Args:
        config_class: A frozen dataclass derived from :class:`rayvec.TrainConfig`, with a name in ``algorithm``.
        learner: Called with the observation space and the action space of one environment and the settings.
    """
    CONFIGS[config_class.algorithm] = config_class
    LEARNERS[config_class] = learner


def choose_engine(config: TrainConfig) -> TrainConfig:
    """Returns `config` with ``num_nodes=0`` (this machine, without Ray) where nothing asks for Ray.

    Ray is used if `num_nodes` is 1 or more, an address is given (`config.address` or ``RAY_ADDRESS``), Ray is
    initialised in this process, or the learner has ranks apart from the environments.
    """
    is_initialized = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    has_ranks_on_ray = config.learner_mode in ("shared", "dedicated")
    asks_for_ray = config.address or os.environ.get("RAY_ADDRESS") or is_initialized or has_ranks_on_ray
    return config if config.num_nodes is not None or asks_for_ray else replace(config, num_nodes=0)


def make_env(config: TrainConfig, num_envs: int | None = None, first_id: int = 0) -> RayVecEnv:
    """Returns the environments of a run; the caller closes them.

    Args:
        config: Settings of the run.
        num_envs: How many of them, where a rank has a part; by default all.
        first_id: Global index of the first of these.
    """
    num_envs = num_envs or config.num_envs
    makes: Any = {"env": config.env_id, "num_envs": num_envs, "env_kwargs": config.env_kwargs}
    if config.native is not None:
        make = functools.partial(_function(config.native, "native"), **config.env_kwargs)
        sizes = sub_batch_sizes(num_envs, config.num_nodes, config.workers_per_node)
        makes = {"env": [functools.partial(make, size) for size in sizes], "num_envs": num_envs, "native": True}
    return RayVecEnv(
        **makes,
        wrappers=[_function(name) for name in config.wrappers],
        num_nodes=config.num_nodes,
        workers_per_node=config.workers_per_node,
        address=config.address if config.num_nodes != 0 else None,  # then it is the address of the learner's ranks
        first_id=first_id,
    )


@contextlib.contextmanager
def open_env(config: TrainConfig) -> Iterator[RayVecEnv]:
    """Yields the environments of a run on the engine of `choose_engine`, and prints on standard error which it is.

    A Ctrl-C that passes ends the workers at once, even in the middle of a step.
    """
    config = choose_engine(config)
    with make_env(config) as env:
        nodes = env.topology.nodes
        on_ray = f"on Ray (nodes: {len(nodes)}, workers: {sum(node.num_workers for node in nodes)})"
        where = "on this machine, without Ray" if config.num_nodes == 0 else on_ray
        print(f"rayvec: {env.num_envs} environments {where}", file=sys.stderr)
        try:
            yield env
        except KeyboardInterrupt:
            env.close(terminate=True)
            raise


def _function(name: str, setting: str = "wrappers") -> Callable[..., Any]:
    """Returns the function that "module:function" names; a worker that unpickles it imports the module."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        if callable(function):
            return function  # type: ignore[no-any-return]
        problem = "no function"
    except (ImportError, AttributeError, ValueError) as error:
        problem = str(error)
    raise ConfigError(
        "wrappers names functions that take an environment and return one."
        if setting == "wrappers"
        else "native names a function that takes a number of environments and returns a gymnasium.vector.VectorEnv.",
        expected="module:function, which can be imported",
        got=f"{name!r} ({problem})",
        remedy='Correct the name, for example "gymnasium.wrappers:FlattenObservation".'
        if setting == "wrappers"
        else 'Correct the name, for example "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv".',
    )


def make_learner(config: TrainConfig, env: RayVecEnv) -> Learner:
    """Returns the learner of a run with its initial weights, in this process."""
    return _learner_builder(config, env)()


@contextlib.contextmanager
def open_learner(config: TrainConfig, env: RayVecEnv) -> Iterator[Learner]:
    """Yields the learner of a run with its initial weights: in this process, or as ranks on Ray.

    Ranks on other nodes than the environments claim their cores. On the same nodes they share the cores of the
    environments' workers. Workers wait while the ranks learn, except where steps are collected ahead (SAC and IMPALA):
    there, dedicated nodes or fewer workers keep workers and ranks from competing for cores.
    """
    build = _learner_builder(config, env)
    with torch_threads(config.learner_threads):
        if config.learner_mode == "driver":
            yield build()
            return
        is_dedicated = config.learner_mode == "dedicated"
        if config.num_nodes == 0 and is_dedicated:
            raise ConfigError(
                "Dedicated ranks are on nodes of Ray where no environments step.",
                expected="environments on nodes of Ray with learners='dedicated'",
                got="num_nodes=0, which is this machine without Ray",
                remedy="Pass num_nodes=1 or more, or learners='shared'.",
            )
        from rayvec.distributed.learner_group import LearnerGroup  # imports Ray, which one learner does without

        group = LearnerGroup(
            build,
            config.num_learners,
            config.learner_device,
            learner_threads=config.learner_threads,
            timeout_s=wait_limit_s(config),
            num_cpus=None if is_dedicated else 0,
            avoid_nodes=[node.node_id for node in env.topology.nodes] if is_dedicated else (),
            address=config.address,
        )
        with contextlib.closing(group):
            yield group


def wait_limit_s(config: TrainConfig) -> float:
    """Returns how long ranks wait for each other."""
    return _COMPILING_S if getattr(config, "compile", False) else _WAIT_S


def _learner_builder(config: TrainConfig, env: RayVecEnv) -> Callable[[], Learner]:
    return functools.partial(LEARNERS[type(config)], env.single_observation_space, env.single_action_space, config)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch compute with `count` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
