"""Whether a run compiles its updates: what ``compile="auto"`` decides, and why.

The rule depends on the settings and on the observation space alone, so that all ranks, a resumed run and a second run
with the same seed decide alike; compiled updates differ from others by rounding. :func:`rayvec.train` decides: a
learner that is made directly compiles with ``compile=True`` alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gymnasium import spaces

from rayvec.policies.encoders import has_images

__all__ = ["choice_of", "compile_s", "compiles", "decided"]

_SAVED_MS = {"ppo": 0.5, "impala": 0.5, "sac": 2.0}
"""What a compiled minibatch saves on a CPU, in milliseconds: a lower bound of what `benchmarks/updates.py`
measured. For other algorithms nothing is known."""

_SAVED_MS_PER_IMAGE = 0.05
_SAVED_MS_RECURRENT = 1.5
_COST_S = 30.0
_COST_S_PER_STEP = 1.5  # of a sequence, whose steps are all in the graph
_GAIN = 2.0


def compiles(config: Any, observation_space: spaces.Space[Any]) -> bool:
    """Whether the learner of a run compiles its updates.

    Args:
        config: Settings of the run.
        observation_space: Of one environment.
    """
    if config.compile != "auto":
        return bool(config.compile)
    return _reason_against(config) is None and _saved_s(config, observation_space) >= _GAIN * compile_s(config)


def decided(config: Any, observation_space: spaces.Space[Any]) -> Any:
    """Returns settings in which ``compile`` is True or False, for a learner; others as they are."""
    is_open = getattr(config, "compile", None) == "auto"
    return replace(config, compile=compiles(config, observation_space)) if is_open else config


def choice_of(config: Any, observation_space: spaces.Space[Any]) -> str | None:
    """Returns in one line what ``compile="auto"`` decides, and why.

    It is None where the settings decide, and in runs that are too short to save what compiling costs.

    Args:
        config: Settings of the run.
        observation_space: Of one environment.
    """
    if getattr(config, "compile", None) != "auto":
        return None
    reason, cost_s = _reason_against(config), compile_s(config)
    saved_s = _saved_s(config, observation_space) if config.algorithm in _SAVED_MS else math.inf
    if saved_s < _GAIN * cost_s:
        return None
    if reason is not None:
        return f"updates are not compiled: {reason} (compile='auto')"
    saves = f"{config.minibatches[0]:,} minibatches save at least {saved_s:,.0f} s, compiling costs {cost_s:.0f} s"
    return f"updates are compiled: {saves} (compile='auto')"


def _reason_against(config: Any) -> str | None:
    """Returns why a run does not compile, however long it is; None if it may."""
    if config.algorithm not in _SAVED_MS:
        return f"what {config.algorithm} would save is not known"
    if config.learner_device != "cpu":
        return f"what it saves with learner_device={config.learner_device!r} was not measured"
    if config.network is not None:
        return "a network of your own may not compile"
    return None


def _saved_s(config: Any, observation_space: spaces.Space[Any]) -> float:
    """Returns at least how many seconds a run saves."""
    count, rows = config.minibatches
    per_image = _SAVED_MS_PER_IMAGE if has_images(observation_space) else 0.0
    per_minibatch = _SAVED_MS_RECURRENT if _is_recurrent(config) else _SAVED_MS[config.algorithm]
    saved_ms: float = count * (per_minibatch + per_image * rows)
    return 1e-3 * saved_ms


def compile_s(config: Any) -> float:
    """Returns how many seconds compiling takes, about."""
    steps = config.burn_in + config.sequence_length if _is_recurrent(config) else 0
    return _COST_S + _COST_S_PER_STEP * steps


def _is_recurrent(config: Any) -> bool:
    return getattr(config, "recurrent", None) is not None
