"""What is checked of an environment's spaces when a run begins."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rayvec.config import TrainConfig
from rayvec.config.network import NetworkConfig
from rayvec.errors import ConfigError
from rayvec.policies.encoders import leaf_spaces

__all__ = ["check_same_spaces", "warn_of_wide_ranges"]

_WIDE = 100.0
_UNBOUNDED = 1e30
"""Bounds beyond this mean that there is none."""


def warn_of_wide_ranges(observation_space: spaces.Space[Any], config: TrainConfig) -> None:
    """Warns where a Box has bounds beyond ±100 and nothing normalises what the default network reads."""
    if not isinstance(config, NetworkConfig) or config.network is not None or getattr(config, "normalize_obs", False):
        return
    for path, leaf in leaf_spaces(observation_space):
        if not isinstance(leaf, spaces.Box) or leaf.dtype == np.uint8:
            continue
        bounds = np.abs(np.concatenate([leaf.low.ravel(), leaf.high.ravel()]).astype(np.float64))
        wide = bounds[(bounds > _WIDE) & (bounds < _UNBOUNDED)]
        if len(wide):
            place = "".join(f"[{key!r}]" for key in path)
            setting = "Pass normalize_obs=True, or wrap" if hasattr(config, "normalize_obs") else "Wrap"
            warnings.warn(
                f"Observations{place} range up to ±{wide.max():g}, and nothing normalises them. Networks learn badly "
                f"from numbers beyond ±{_WIDE:g}. {setting} the environment in gymnasium.wrappers.NormalizeObservation "
                "or RescaleObservation.",
                UserWarning,
                stacklevel=2,
            )
            return


def check_same_spaces(found: Sequence[tuple[spaces.Space[Any], spaces.Space[Any]]]) -> None:
    """Raises a ConfigError where ranks found other observation or action spaces than rank 0."""
    for rank, (observation, action) in enumerate(found):
        if (observation, action) != found[0]:
            raise ConfigError(
                "All environments of a run have the same spaces.",
                expected=f"observations {found[0][0]} and actions {found[0][1]}, as on rank 0",
                got=f"observations {observation} and actions {action} on rank {rank}",
                remedy="Let the class or function that makes environments return the same spaces at every call.",
            )
