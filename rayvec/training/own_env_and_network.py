"""The user's own environment and network in the settings of a run, by name where they have one."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rayvec.config import CONFIGS, TrainConfig
from rayvec.config.algorithms import NetworkConfig
from rayvec.config.plugins import import_plugins
from rayvec.config.presets import changed
from rayvec.config.references import Reference, is_unnamed, refer, resolve
from rayvec.config.schema import field_names, require
from rayvec.errors import ConfigError

__all__ = ["environment_of", "resume_command", "with_own_parts"]


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
            "network" in field_names(type(config)),
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
    require(
        callable(env) or (isinstance(env, list | tuple) and env and all(map(callable, env))),
        f"env is {repr(env)[:200]}. It must be an id, an EnvSpec, a class or function that makes one environment, "
        "or a list of one such for each environment.",
    )
    return refer(env)


def environment_of(config: TrainConfig) -> Any:
    """Returns the environment of a run in the form that :class:`rayvec.RayVecEnv` takes.

    Raises:
        ConfigError: It was passed in Python, has no name, and was not passed again.
    """
    name = config.env_id
    return resolve("env_id", name) if isinstance(name, Reference) or is_unnamed(name) else name


def resume_command(config: TrainConfig, run_dir: Path) -> str:
    """Returns how to resume a run: on the command line, or in Python where a part has no name."""
    names = {"env": config.env_id, "eval_env": config.eval_env, "network": getattr(config, "network", None)}
    unnamed = [f", {argument}=..." for argument, name in names.items() if name is not None and is_unnamed(name)]
    if unnamed:
        return f"rayvec.resume({str(run_dir)!r}{''.join(unnamed)})"
    plugins = "".join(f" --plugin {module}" for module in config.plugin)
    return f"rayvec train {config.algorithm}{plugins} --resume {shlex.quote(str(run_dir))}"
