"""What is checked of an environment's spaces when a run begins."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rayvec.config import TrainConfig
from rayvec.config.algorithms import ActorCriticConfig, NetworkConfig
from rayvec.errors import ConfigError
from rayvec.policies.encoders import leaf_spaces
from rayvec.training.saved_spaces import spaces_from_plain
from rayvec.wrappers import MASK_KEY

__all__ = ["check_kept_spaces", "check_same_spaces", "parts_of", "warn_of_unreachable_actions", "warn_of_wide_ranges"]

_WIDE = 100.0
_FAR_ACTION, _WIDE_ACTION = 3.0, 20.0
_UNBOUNDED = 1e30
"""Bounds beyond this mean that there is none."""


def warn_of_wide_ranges(observation_space: spaces.Space[Any], config: TrainConfig) -> None:
    """Warns where a Box has bounds beyond ±100 and nothing normalises what the default network reads."""
    if not isinstance(config, NetworkConfig) or config.network is not None or config.normalize_obs:
        return
    for path, leaf in leaf_spaces(observation_space):
        if not isinstance(leaf, spaces.Box) or leaf.dtype == np.uint8:
            continue
        bounds = np.abs(np.concatenate([leaf.low.ravel(), leaf.high.ravel()]).astype(np.float64))
        wide = bounds[(bounds > _WIDE) & (bounds < _UNBOUNDED)]
        if len(wide):
            place = "".join(f"[{key!r}]" for key in path)
            warnings.warn(
                f"Observations{place} range up to ±{wide.max():g}, and nothing normalises them. Networks learn badly "
                f"from numbers beyond ±{_WIDE:g}. Pass normalize_obs=True, or scale them in the environment.",
                UserWarning,
                stacklevel=2,
            )
            return


def warn_of_unreachable_actions(action_space: spaces.Space[Any], config: TrainConfig) -> None:
    """Warns where a Box has bounds far from what a policy of PPO or IMPALA draws at first, about -1 to 1."""
    if not isinstance(config, ActorCriticConfig):
        return
    for path, leaf in leaf_spaces(action_space):
        if not isinstance(leaf, spaces.Box):
            continue
        low, high = leaf.low.astype(np.float64), leaf.high.astype(np.float64)
        is_bounded = np.isfinite(low) & np.isfinite(high)
        is_odd = (is_bounded & (high - low > _WIDE_ACTION)) | (low > _FAR_ACTION) | (high < -_FAR_ACTION)
        if (is_odd & ~(is_bounded & config.scale_actions)).any():
            place = "".join(f"[{key!r}]" for key in path)
            warnings.warn(
                f"Actions{place} range from {low.min():g} to {high.max():g}, and the policy draws about -1 to "
                "1 at first: it may never reach most of them. Leave scale_actions at True, and give the Box finite "
                "bounds.",
                UserWarning,
                stacklevel=2,
            )


def check_same_spaces(found: Sequence[tuple[spaces.Space[Any], spaces.Space[Any]]]) -> None:
    """Raises a ConfigError where ranks found other observation or action spaces than rank 0."""
    for rank, (observation, action) in enumerate(found):
        if (observation, action) != found[0]:
            raise ConfigError(
                f"Rank {rank} has observations {observation} and actions {action}, and rank 0 has {found[0][0]} "
                f"and {found[0][1]}. Let the class or function that makes environments return the same spaces at "
                "every call."
            )


def check_kept_spaces(found: Sequence[spaces.Space[Any]], state: Mapping[str, Any]) -> None:
    """Raises a ConfigError where the environments have other spaces than the run whose state is given."""
    described = state.get("spaces")
    kept = () if described is None else spaces_from_plain(described)
    for name, ours, theirs in zip(("observations", "actions"), found, kept, strict=False):
        if parts_of(ours) != parts_of(theirs):
            raise ConfigError(
                f"The environments have {name} of {ours}, and the run began with {theirs}. Undo the change of the "
                "environment, or start a new run."
            )


def parts_of(space: spaces.Space[Any]) -> list[Any]:
    """Returns what a network reads or chooses, in its order: not the mask, nor the bounds of numbers."""
    leaves = [(path, leaf) for path, leaf in leaf_spaces(space) if path != (MASK_KEY,)]
    is_beside_mask = {path[:1] for path, _ in leaves} == {("observation",)}  # as rayvec.wrappers.ActionMask has it
    sizes = [np.array(getattr(leaf, "nvec", getattr(leaf, "n", None))).tolist() for _, leaf in leaves]
    return [
        (path[1:] if is_beside_mask else path, type(leaf), leaf.shape, size)
        for (path, leaf), size in zip(leaves, sizes, strict=True)
    ]
