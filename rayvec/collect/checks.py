"""Checks of what a collector is given."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from rayvec.errors import ConfigError, check_choice, check_count, check_flag
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["check_env", "check_open", "check_seed", "check_settings", "check_state"]


def check_env(env: Any) -> None:
    """Raises ``ConfigError`` unless the environments can take chunks."""
    if isinstance(env, RayVecEnv):
        return
    wraps = isinstance(getattr(env, "unwrapped", None), RayVecEnv)
    raise ConfigError(
        f"{type(env).__module__}.{type(env).__qualname__} is not a rayvec.RayVecEnv. "
        + (
            "rayvec.Collector does not accept wrappers around all environments: pass RayVecEnv(..., wrappers=[...])."
            if wraps
            else "rayvec.Collector requires one; for other environments, use the collector of their library."
        )
    )


def check_open(closed: bool) -> None:
    """Raises ``ConfigError`` if a collector is closed: its workers no longer have the policy and its weights."""
    if closed:
        raise ConfigError(
            "collect was called after close(). Make another Collector of the same environments and policy."
        )


def check_seed(seed: Any) -> int | None:
    """Returns `seed`, which must be a whole number of at least 0, or None.

    Raises:
        ConfigError: It is not.
    """
    if seed is None or (isinstance(seed, Integral) and int(seed) >= 0):
        return None if seed is None else int(seed)
    raise ConfigError(f"seed is {seed!r}. It must be a whole number of at least 0, or None.")


def check_settings(
    *, inference: Any, prefetch: bool, by_reference: bool, max_staleness: int | None, on_bad_obs: Any
) -> None:
    """Raises ``ConfigError`` if settings of a collector are unknown, or can't be combined."""
    check_choice("inference", inference, ("worker", "driver", "node"))
    check_choice("on_bad_obs", on_bad_obs, ("raise", "keep"))
    if max_staleness is not None:
        check_count("max_staleness", max_staleness)
        _check_asynchronous(inference=inference, by_reference=by_reference)
    for name, value in (("prefetch", prefetch), ("by_reference", by_reference)):
        if check_flag(name, value) and inference != "worker":
            raise ConfigError(
                f"{name}=True was passed with inference={inference!r}. `prefetch` and `by_reference` require "
                "inference='worker'."
            )


def _check_asynchronous(**settings: Any) -> None:
    """Checks the settings beside `max_staleness`."""
    fitting = {"inference": ("worker",), "by_reference": (False,)}
    for name, value in settings.items():
        if value not in fitting[name]:
            raise ConfigError(
                f"{name}={value!r} was passed with max_staleness. `max_staleness` requires {name}={fitting[name][0]!r}."
            )


def check_state(state: Any) -> dict[str, int]:
    """Returns what ``Collector.state_dict`` has returned.

    Raises:
        ConfigError: It is something else.
    """
    names = ("noise_seed", "first_step", "version")
    found = dict(state) if isinstance(state, Mapping) else {}
    if not all(isinstance(found.get(name), Integral) for name in names):
        raise ConfigError(f"The state is {repr(state)[:200]}. Pass what collector.state_dict() returned.")
    return {name: int(found[name]) for name in names}
