"""What is checked of an environment's spaces when a run begins."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rayvec.config import TrainConfig
from rayvec.config.algorithms import NetworkConfig
from rayvec.errors import ConfigError
from rayvec.policies.encoders import leaf_spaces
from rayvec.training.saved_spaces import spaces_from_plain
from rayvec.wrappers import MASK_KEY

__all__ = ["check_kept_spaces", "check_same_spaces", "warn_of_wide_ranges"]

_WIDE, _UNBOUNDED = 100.0, 1e30
"""Bounds beyond the second mean that there is none."""


def warn_of_wide_ranges(observation_space: spaces.Space[Any], config: TrainConfig) -> None:
    """Warns where a Box has bounds beyond ±100 and nothing normalises what the default network reads."""
    if not isinstance(config, NetworkConfig) or config.network is not None or config.normalize_obs:
        return
    for path, leaf in leaf_spaces(observation_space):
        if isinstance(leaf, spaces.Box) and leaf.dtype != np.uint8:
            bounds = np.abs(np.stack([leaf.low, leaf.high]).astype(np.float64))
            wide = bounds[(bounds > _WIDE) & (bounds < _UNBOUNDED)]
            if wide.size:
                place = "".join(f"[{key!r}]" for key in path)
                warnings.warn(
                    f"Observations{place} range up to ±{wide.max():g}, and nothing normalises them. Networks learn "
                    f"badly from numbers beyond ±{_WIDE:g}. Pass normalize_obs=True, or scale them in the environment.",
                    UserWarning,
                    stacklevel=2,
                )


def check_same_spaces(found: Sequence[tuple[spaces.Space[Any], spaces.Space[Any]]]) -> None:
    """Raises a ConfigError where ranks found other observation or action spaces than rank 0."""
    for rank, pair in enumerate(found):
        if pair != found[0]:
            raise ConfigError(
                f"Rank {rank} has observations and actions of {pair}, and rank 0 of {found[0]}. Let the class or "
                "function that makes environments return the same spaces at every call."
            )


def check_kept_spaces(found: Sequence[spaces.Space[Any]], state: Mapping[str, Any]) -> None:
    """Raises a ConfigError where the environments have other spaces than the run whose state is given."""
    described = state.get("spaces")
    kept = () if described is None else spaces_from_plain(described)
    for name, ours, theirs in zip(("observations", "actions"), found, kept, strict=False):
        if _parts_of(ours) != _parts_of(theirs):
            raise ConfigError(
                f"The environments have {name} of {ours}, and the run began with {theirs}. Use an environment with the "
                "same spaces, or start a new run."
            )


def _parts_of(space: spaces.Space[Any]) -> list[Any]:
    """Returns what a network reads or chooses, in its order: not the mask, nor the bounds of numbers."""
    leaves = [(path, leaf) for path, leaf in leaf_spaces(space) if path != (MASK_KEY,)]
    is_beside_mask = {path[:1] for path, _ in leaves} == {("observation",)}  # as rayvec.wrappers.ActionMask has it
    sizes = [np.array(getattr(leaf, "nvec", getattr(leaf, "n", None))).tolist() for _, leaf in leaves]
    return [
        (path[1:] if is_beside_mask else path, type(leaf), leaf.shape, size)
        for (path, leaf), size in zip(leaves, sizes, strict=True)
    ]
