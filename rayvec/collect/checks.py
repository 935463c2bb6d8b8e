"""Checks of what a collector is given."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from rayvec.errors import ConfigError, check_choice, check_count, check_flag
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["check_counts", "check_env", "check_seed", "check_settings", "check_state"]

_REQUIRED: dict[str, dict[str, Any]] = {
    "prefetch": {"inference": "worker"},
    "by_reference": {"inference": "worker"},
    "max_staleness": {"inference": "worker", "by_reference": False},
}
"""What settings require of others."""


def check_env(env: Any) -> None:
    """Raises ``ConfigError`` unless the environments can take chunks."""
    if not isinstance(env, RayVecEnv):
        raise ConfigError(
            f"{type(env).__module__}.{type(env).__qualname__} is not a rayvec.RayVecEnv, which rayvec.Collector "
            "requires. In place of a wrapper around all environments, pass RayVecEnv(..., wrappers=[...]). For other "
            "environments, use the collector of their library."
        )


def check_seed(seed: Any) -> int | None:
    """Returns `seed`, which must be a whole number of at least 0, or None.

    Raises:
        ConfigError: It is not.
    """
    if seed is None or (isinstance(seed, Integral) and int(seed) >= 0):
        return None if seed is None else int(seed)
    raise ConfigError(f"seed is {seed!r}. It must be a whole number of at least 0, or None.")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if settings of a collector are unknown, or can't be combined."""
    check_choice("inference", settings["inference"], ("worker", "driver", "node"))
    check_choice("on_bad_obs", settings["on_bad_obs"], ("raise", "keep"))
    if settings["max_staleness"] is not None:
        check_count("max_staleness", settings["max_staleness"])
    for name in ("prefetch", "by_reference"):
        check_flag(name, settings[name])
    for name, required in _REQUIRED.items():
        for other, value in required.items():
            if settings[name] and settings[other] != value:
                raise ConfigError(
                    f"{name}={settings[name]!r} was passed with {other}={settings[other]!r}. `{name}` requires "
                    f"{other}={value!r}."
                )


def check_counts(n_step: Any, n_episode: Any, *, only_steps: bool) -> None:
    """Raises ``ConfigError`` unless exactly one count is given, and a collector can collect it."""
    if (n_step is None) == (n_episode is None):
        raise ConfigError(
            f"collect was called with n_step={n_step} and n_episode={n_episode}. Pass one of them, for example "
            "n_step=4096 or n_episode=20."
        )
    check_count("n_step" if n_episode is None else "n_episode", n_step if n_episode is None else n_episode)
    if n_episode is not None and only_steps:
        raise ConfigError(
            f"n_episode={n_episode} was passed to a collector with prefetch, max_staleness or by_reference. Pass "
            "n_step, or call drain() and use another Collector on these environments for episodes."
        )


def check_state(state: Any) -> dict[str, int]:
    """Returns what ``Collector.state_dict`` has returned.

    Raises:
        ConfigError: It is something else.
    """
    try:
        return {name: operator.index(state[name]) for name in ("noise_seed", "first_step", "version")}
    except (KeyError, TypeError):
        raise ConfigError(f"The state is {repr(state)[:200]}. Pass what collector.state_dict() returned.") from None
