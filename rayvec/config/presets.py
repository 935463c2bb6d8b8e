"""Presets: settings that are tuned to a kind of environment, by name and by the environment's id.

PPO's for Box2D, MuJoCo and Atari and SAC's for MuJoCo are the usual ones, of CleanRL and RL Baselines3 Zoo, at the
numbers of environments that suit a few cores.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

from rayvec.config.schema import check_names

__all__ = ["PRESETS", "PresetMeta", "preset_of", "with_env_id"]

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
            "minibatch_size": 256,
            "entropy_coef": 0.0,
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
        },
        "box2d": {
            "total_steps": 1_000_000,
            "num_steps": 1024,
            "learning_rate": 1e-3,
            "gamma": 0.999,
            "gae_lambda": 0.98,
            "minibatch_size": 256,
            "clip_value_loss": False,
        },
        "mujoco": {
            "total_steps": 1_000_000,
            "num_envs": 8,
            "num_steps": 256,
            "learning_rate": 3e-4,
            "num_epochs": 10,
            "minibatch_size": 64,
            "entropy_coef": 0.0,
            "normalize_obs": True,
            "normalize_reward": True,
        },
        "atari": {
            "env_kwargs": {"frameskip": 1},
            "wrappers": ("rayvec.wrappers:atari",),
            "total_steps": 10_000_000,
            "num_envs": 8,
            "minibatch_size": 256,
            "clip_coef": 0.1,
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
        "classic": {"total_steps": 300_000},
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


class PresetMeta(type):
    """Lets the settings of a preset take the place of defaults: what is passed to the constructor counts first."""

    def __call__(cls, **given: Any) -> Any:
        """Makes settings; `preset` is replaced by the name of the one that applies.

        Raises:
            ConfigError: There is no such setting, or one can't work.
        """
        check_names(cls, given)
        algorithm, env_id = getattr(cls, "algorithm", ""), str(given.get("env_id", getattr(cls, "env_id", "")))
        fitting, preset = preset_of(env_id, algorithm), given.get("preset", "auto")
        if preset == "auto":  # native sub-batches are not the environment of the default id
            preset = "none" if given.get("native") and "env_id" not in given else fitting
        presets = PRESETS.get(algorithm, {})
        base_name = re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])
        own = presets.get(base_name, {}) if preset == fitting != "none" else {}
        settings = super().__call__(**{**presets.get(str(preset), {}), **own, **given, "preset": preset})
        object.__setattr__(settings, "_given", given)
        return settings


def with_env_id(settings: Any, env_id: str) -> Any:
    """Returns settings for another environment: with its preset in place of that of the environment before."""
    return type(settings)(**{**_settings_given(settings), "env_id": env_id})


def _settings_given(settings: Any) -> dict[str, Any]:
    """Returns what a user has given.

    A copy (``dataclasses.replace``, YAML) was given every setting. Then only settings without a default, and those that
    differ from the preset, count as given: a copy does not know what was given with the value of the preset.
    """
    kind, given = type(settings), dict(settings._given)
    own = [each for each in fields(kind) if each.init]
    if not given.keys() >= {each.name for each in own}:
        return given
    needed = {each.name: given[each.name] for each in own if each.default is each.default_factory is MISSING}
    of_preset = kind(**{**needed, "env_id": settings.env_id, "preset": settings.preset})
    chosen = {name: value for name, value in given.items() if value != getattr(of_preset, name)}
    if settings.preset != preset_of(settings.env_id, kind.algorithm):
        chosen["preset"] = settings.preset
    return needed | chosen
