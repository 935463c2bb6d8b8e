"""The learner of a run: found by the class of its settings, and opened in this process or on ranks.

`register` adds an algorithm. `with_own_parts` puts what is passed in Python in the place of settings.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rayvec.config import CONFIGS, IMPALAConfig, PPOConfig, SACConfig, TrainConfig
from rayvec.config.algorithms import NetworkConfig
from rayvec.config.presets import changed
from rayvec.config.references import import_plugins, is_unnamed, refer, resolve
from rayvec.config.schema import fields_of
from rayvec.data.global_random import seed_globals
from rayvec.errors import ConfigError, require
from rayvec.learners.base import Learner
from rayvec.learners.compile_decision import compile_s, compiles, decided
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.sac import SACLearner
from rayvec.servers.env_servers import EnvServers
from rayvec.vector.ray_vec_env import RayVecEnv

LEARNERS: dict[type[TrainConfig], Callable[..., Learner]] = {
    PPOConfig: PPOLearner,
    SACConfig: SACLearner,
    IMPALAConfig: IMPALALearner,
}
"""Learners by the class of their settings; each is called with the spaces of one environment and the settings."""

_WAIT_S, _COMPILING_S = 60.0, 300.0
"""How long ranks wait for each other; a rank that compiles for another shape takes half a minute and more."""

_LOCK, _DTYPES = threading.Lock(), list[torch.dtype]()
"""Torch's default dtype belongs to the process: of trainings that overlap, the last one to end restores the first."""


def register(config_class: type[TrainConfig], learner: Callable[..., Learner]) -> None:
    """Adds an algorithm: from now on :func:`rayvec.train` takes settings of this class.

    Args:
        config_class: Derived from :class:`rayvec.TrainConfig`, with a name in ``algorithm``, and decorated by
            ``rayvec.config.dataclass(frozen=True, kw_only=True)``.
        learner: Called with the observation space and the action space of one environment and the settings.

    Raises:
        ConfigError: The class has another decorator, which checks nothing.
    """
    require(
        "__pydantic_fields__" in vars(config_class),
        f"{config_class.__name__} has no decorator that checks values. Use rayvec.config.dataclass.",
    )
    CONFIGS[config_class.algorithm] = config_class
    LEARNERS[config_class] = learner


@contextlib.contextmanager
def own_torch_modes() -> Iterator[None]:
    """Lets torch compute gradients, and make and keep tensors of float32, whatever the script has set."""
    with _LOCK:
        _DTYPES.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        with _LOCK:
            before = _DTYPES.pop()
            if not _DTYPES:
                torch.set_default_dtype(before)


@own_torch_modes()
def network_of(
    config: TrainConfig, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> torch.nn.Module:
    """Returns the network of a run on the CPU and in float32, as it acts, with its initial weights."""
    here = replace(config, learner_device="cpu", precision="float32")
    return LEARNERS[type(config)](observation_space, action_space, here).module


@contextlib.contextmanager
def open_learner(config: TrainConfig, env: RayVecEnv, steps: int, *, fewer: bool) -> Iterator[Learner]:
    """Yields the learner of a run with its initial weights: in this process, or as ranks.

    With ``num_nodes=0`` and no address, ranks are processes of this machine, else they are on Ray. Ranks on other
    nodes than the environments claim their cores. On the same nodes they share the cores of the environments'
    workers. Workers wait while the ranks learn, except where steps are collected ahead (SAC and IMPALA): there,
    dedicated nodes or fewer workers keep workers and ranks from competing for cores.

    Args:
        config: Settings of the run.
        env: The environments of the run.
        steps: Steps that the run has taken, on which the ranks' global random generators depend.
        fewer: Whether ranks may be fewer, where there is no room for all of them.
    """
    spaces_of_one = env.single_observation_space, env.single_action_space
    build = functools.partial(LEARNERS[type(config)], *spaces_of_one, decided(config, spaces_of_one[0]))
    with torch_threads(config.learner_threads):
        if config.learner_mode == "driver":
            yield build()
            return
        is_dedicated = config.learner_mode == "dedicated"
        from rayvec.distributed.learner_group import LearnerGroup

        group = LearnerGroup(
            functools.partial(_seeded, config.seed, steps, build),
            config.num_learners,
            config.learner_device,
            learner_threads=config.learner_threads,
            timeout_s=wait_limit_s(config),
            num_cpus=None if is_dedicated else 0,
            avoid_nodes=[node.node_id for node in env.topology.nodes] if is_dedicated else (),
            num_nodes=0 if config.num_nodes == 0 and config.address is None else None,
            address=config.address,
            fewer=fewer,
            saves_state=False,  # a run continues from its checkpoint
        )
        with contextlib.closing(group):
            yield group


def _seeded(seed: int, steps: int, build: Callable[[], Learner]) -> Learner:
    """Makes the learner of a rank. All ranks seed the global generators alike."""
    seed_globals(seed, 0, 3, steps)
    return build()


def wait_limit_s(config: TrainConfig) -> float:
    """Returns how long ranks wait for each other: longer where they may compile, for some observations at least."""
    image = spaces.Box(0, 255, (84, 84, 1), np.uint8)
    may_compile = hasattr(config, "compile") and compiles(config, image)
    return max(_COMPILING_S, 4 * compile_s(config)) if may_compile else _WAIT_S


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch compute with `count` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_own_parts(
    config: TrainConfig,
    env: Any = None,
    network: Callable[..., Any] | None = None,
    eval_env: Any = None,
    *,
    begun: bool = False,
) -> TrainConfig:
    """Returns settings that name an environment and a network, and carry them.

    Args:
        config: The settings.
        env: An id, a spec, a class or function that makes an environment, or a list of one for each environment; None
            keeps that of the settings.
        network: See :attr:`rayvec.config.algorithms.NetworkConfig.network`; None keeps that of the settings.
        eval_env: As `env`, for evaluations; None keeps that of the settings.
        begun: Whether the run has begun. Then only what the settings could not name may be passed, or the same again.

    Raises:
        ConfigError: Settings of no learner, one of the others is of another kind, the run began with another one, or
            the network or a plugin can't be imported.
    """
    if isinstance(config, TrainConfig):
        import_plugins(config.plugin)  # which may register the class; and who reads the run's directory imports them
    if not isinstance(config, TrainConfig) or CONFIGS.get(config.algorithm) is not type(config):
        raise ConfigError(
            f"The settings are {repr(config)[:200]}. They must be an object of "
            f"{', '.join(each.__name__ for each in CONFIGS.values())}, or of a class that "
            "rayvec.training.runs.register adds."
        )
    envs = {"env_id": env, "eval_env": eval_env}
    parts = {name: _named_env(each) for name, each in envs.items() if each is not None}
    if network is not None:
        require(
            callable(network) and (isinstance(network, type) or not hasattr(network, "parameters")),
            f"network is {repr(network)[:200]}. It must be a function or class that makes the module from "
            "(observation space, action space, settings); a name, 'module:name', belongs in the settings.",
        )
        require(
            "network" in fields_of(type(config)),
            f"{type(config).__name__} has no setting `network`: its learner makes its own network. Leave network out.",
        )
        parts["network"] = refer(network)
    for name, part in parts.items() if begun else ():
        before = getattr(config, name)
        require(
            name == "eval_env" or part == before or (before is not None and is_unnamed(before)),
            f"The {name} is {part}, and the run began with {before}. Leave {name.removesuffix('_id')}= out, or start "
            "a new run.",
        )
    if "env_id" in parts and not begun:
        require(
            config.native is None,
            f"env was passed with native={config.native!r}, which makes the environments too. Leave one of them out.",
        )
        config = changed(config, env_id=parts["env_id"])
    config = replace(config, **parts)  # type: ignore[arg-type]
    if isinstance(config, NetworkConfig) and config.network is not None:
        resolve("network", config.network)  # now: environments, or a cluster, may take long to start
    return config


def _named_env(env: Any) -> str:
    if isinstance(env, str):
        return env
    if isinstance(env, EnvSpec):
        return env.id if gymnasium.registry.get(env.id) == env else refer(env)
    if isinstance(env, EnvServers):
        env = list(env)
    require(
        callable(env) or (isinstance(env, list | tuple) and env and all(map(callable, env))),
        f"env is {repr(env)[:200]}. It must be an id, an EnvSpec, a class or function that makes one environment, "
        "or a list of one such for each environment.",
    )
    return refer(env)
