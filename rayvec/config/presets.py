"""Presets: settings that are tuned to a kind of environment, by name and by the environment's id.

PPO's for Box2D, MuJoCo and Atari and SAC's for MuJoCo are the usual ones, of CleanRL and RL Baselines3 Zoo, at the
numbers of environments that suit a few cores.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from rayvec.config.schema import fields_of

_NAMES = {
    "classic": r"CartPole|Acrobot|MountainCar|MountainCarContinuous|Pendulum",
    "box2d": r"LunarLander|LunarLanderContinuous|BipedalWalker|BipedalWalkerHardcore",
    "mujoco": r"Ant|HalfCheetah|Hopper|Humanoid|HumanoidStandup|InvertedPendulum|InvertedDoublePendulum|Pusher|Reacher"
    r"|Swimmer|Walker2d",
    "atari": r"ALE/\w+",
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {
        "classic": {
            "num_steps": 64,
            "learning_rate": 4e-3,
            "gamma": 0.98,
            "gae_lambda": 0.9,
            "num_epochs": 4,
            "minibatch_size": 256,
            "normalize_reward": False,
            "clip_value_loss": False,
        },
        "CartPole": {
            "learning_rate": 8e-3,
            "num_epochs": 2,
        },
        "Pendulum": {
            "total_steps": 200_000,
            "num_steps": 256,
            "learning_rate": 1e-3,
            "gamma": 0.9,
            "gae_lambda": 0.95,
            "num_epochs": 10,
            "scale_actions": False,
        },
        "box2d": {
            "total_steps": 1_000_000,
            "num_steps": 1024,
            "learning_rate": 1e-3,
            "gamma": 0.999,
            "gae_lambda": 0.98,
            "num_epochs": 4,
            "minibatch_size": 256,
            "entropy_coef": 0.01,
            "normalize_reward": False,
            "clip_value_loss": False,
        },
        "mujoco": {
            "total_steps": 1_000_000,
            "num_envs": 8,
            "num_steps": 256,
            "learning_rate": 3e-4,
            "num_epochs": 10,
            "minibatch_size": 64,
            "normalize_obs": True,
            "scale_actions": False,
        },
        "atari": {
            "env_kwargs": {"frameskip": 1},
            "wrappers": ("rayvec.wrappers:atari",),
            "total_steps": 10_000_000,
            "num_envs": 8,
            "learning_rate": 2.5e-4,
            "num_epochs": 4,
            "minibatch_size": 256,
            "entropy_coef": 0.01,
            "clip_coef": 0.1,
            "normalize_reward": False,
            "clip_reward": 1.0,
        },
    },
    "sac": {
        "classic": {
            "total_steps": 20_000,
            "policy_lr": 1e-3,
            "policy_interval": 1,
            "hidden_sizes": (128, 128),
        },
        "box2d": {"total_steps": 300_000, "learning_starts": 5_000},
        "mujoco": {"total_steps": 1_000_000, "num_steps": 1, "learning_starts": 5_000},
    },
    "impala": {
        "classic": {"total_steps": 300_000, "scale_actions": False},
        "box2d": {"total_steps": 2_000_000, "gamma": 0.99, "num_steps": 128, "num_minibatches": 8},
        "atari": {
            "env_kwargs": {"frameskip": 1},
            "wrappers": ("rayvec.wrappers:atari",),
            "total_steps": 10_000_000,
            "num_envs": 32,
            "num_steps": 20,
            "learning_rate": 6e-4,
            "normalize_reward": False,
            "clip_reward": 1.0,
        },
    },
}
"""Settings by algorithm, then by preset; those under the name of an environment come on top of its preset's."""


def preset_of(env_id: str, algorithm: str) -> str:
    """Returns the name of the preset for an environment, or "none" where the algorithm has none for it.

    >>> preset_of("CartPole-v1", "ppo"), preset_of("ale_py:ALE/Breakout-v5", "ppo"), preset_of("Maze-v0", "ppo")
    ('classic', 'atari', 'none')
    """
    name, known = env_id.rpartition(":")[2], PRESETS.get(algorithm, {})
    is_class = ":" in env_id and "/" not in name
    version = r"-v\d+" if is_class else r"(-v\d+)?"  # Gymnasium takes the newest version
    return next((each for each in _NAMES if each in known and re.fullmatch(f"({_NAMES[each]}){version}", name)), "none")


def _values(algorithm: str, env_id: str, preset: str) -> dict[str, Any]:
    """Returns the settings of a preset, with those of its environment on top."""
    presets, name = PRESETS.get(algorithm, {}), re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])
    own = presets.get(name, {}) if preset == preset_of(env_id, algorithm) != "none" else {}
    return {**presets.get(preset, {}), **own}


def with_preset(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that were given, with those of the preset that applies, and its name as `preset`."""
    env_id, preset = str(given.get("env_id", cls.env_id)), given.get("preset", "auto")
    if preset == "auto":  # native sub-batches are not the environment of the default id
        is_other = given.get("native") and "env_id" not in given
        preset = "none" if is_other else preset_of(env_id, cls.algorithm)
    values = _values(cls.algorithm, env_id, str(preset))
    if given.get("recurrent"):  # the value shares its cell: with raw returns its gradient drowns the policy's
        values.pop("normalize_reward", None)
    return {**values, **given, "preset": preset}


def starting_values(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of every setting that has one: as given, of the preset, or else its default."""
    fields = fields_of(cls).items()
    defaults = {name: each.get_default(call_default_factory=True) for name, each in fields if not each.is_required()}
    return defaults | with_preset(cls, given)


def by_preset(config: Any) -> dict[str, Any]:
    """Returns the settings that have the values of the preset."""
    values = _values(config.algorithm, config.env_id, config.preset)
    return {name: value for name, value in values.items() if getattr(config, name) == value}


def describe_preset(config: Any) -> str:
    """Returns lines of at most 79 characters that say what the preset has chosen; an empty text without one."""
    chosen = ", ".join(f"{name}={value}" for name, value in by_preset(config).items())
    text = f"rayvec: preset {config.preset}: {chosen} (preset='none' keeps the defaults)"
    return textwrap.fill(text, 79, subsequent_indent="  ", break_on_hyphens=False) if chosen else ""


def changed(config: Any, **changes: Any) -> Any:
    """Returns settings with changes, which may bring another preset in the place of that of the environment before.

    A copy (``dataclasses.replace``, YAML) was given every setting. Then only those count as given that differ from the
    preset and the defaults.
    """
    cls, given = type(config), dict(config._given)
    if given.keys() >= fields_of(cls).keys():
        usual = starting_values(cls, {"env_id": config.env_id, "preset": config.preset})
        usual["preset"] = preset_of(config.env_id, config.algorithm)
        del usual["env_id"]
        given = {name: value for name, value in given.items() if name not in usual or value != usual[name]}
    return cls(**{**given, **changes})
