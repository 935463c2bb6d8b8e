"""Settings that change over a run, such as the learning rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["is_constant", "scheduled"]


def scheduled(config: Any, name: str, progress: float) -> float:
    """Returns the value of a setting after a share of a run.

    Args:
        config: Has the setting: a number, which the setting ``<name>_schedule`` multiplies by a factor; or values at
            even distances over the run, between which it is interpolated.
        name: Of the setting.
        progress: The share of `total_steps` that is taken, in [0, 1].
    """
    value = getattr(config, name)
    if isinstance(value, tuple):
        return float(np.interp(progress, np.linspace(0, 1, len(value)), value))
    match getattr(config, f"{name}_schedule"):
        case "linear":
            value *= 1 - progress
        case "cosine":
            value *= (1 + math.cos(math.pi * progress)) / 2
    return float(value)


def is_constant(config: Any, name: str) -> bool:
    """Whether a setting has one value over the whole run."""
    return not isinstance(getattr(config, name), tuple) and getattr(config, f"{name}_schedule") == "constant"
