"""Spaces as tensors and plain values, so that a checkpoint says what its policy observes and does."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rayvec.config import TrainConfig
from rayvec.config.algorithms import NetworkConfig
from rayvec.errors import ConfigError
from rayvec.policies.encoders import leaf_spaces
from rayvec.training.checkpoint import incomplete
from rayvec.wrappers import MASK_KEY

__all__ = [
    "check_kept_spaces",
    "check_same_spaces",
    "space_from_plain",
    "space_to_plain",
    "spaces_from_plain",
    "warn_of_wide_ranges",
]


def space_to_plain(space: spaces.Space[Any]) -> dict[str, Any] | None:
    """Returns what `space_from_plain` makes an equal space from; None for other spaces than those that it makes."""
    match space:
        case spaces.Box():
            bounds = {"low": _packed(space.low), "high": _packed(space.high)}
            return {"kind": "Box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
        case spaces.Discrete():
            return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
        case spaces.MultiDiscrete():
            sizes = {"nvec": torch.tensor(space.nvec), "start": torch.tensor(space.start)}
            return {"kind": "MultiDiscrete", **sizes, "dtype": str(space.dtype)}
        case spaces.MultiBinary():
            return {"kind": "MultiBinary", "shape": list(space.shape)}
        case spaces.Dict() | spaces.Tuple():
            named = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
            parts = {key: space_to_plain(part) for key, part in named.items()}
            if all(isinstance(key, str | int) for key in parts) and None not in parts.values():
                return {"kind": type(space).__name__, "parts": parts}
    return None


def space_from_plain(value: dict[str, Any]) -> spaces.Space[Any]:
    """Returns the space that `space_to_plain` described."""
    match value["kind"]:
        case "Box":
            dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
            low, high = (np.broadcast_to(value[name].numpy(), shape).astype(dtype) for name in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "Discrete":
            dtype = np.dtype(value["dtype"])  # which older versions of Gymnasium don't take
            other = {} if dtype == np.int64 else {"dtype": dtype.type}
            return spaces.Discrete(value["n"], start=value["start"], **other)
        case "MultiDiscrete":
            dtype = np.dtype(value["dtype"])
            return spaces.MultiDiscrete(value["nvec"].numpy(), dtype.type, start=value["start"].numpy())
        case "MultiBinary":
            shape = value["shape"]
            return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
        case kind:
            parts = {key: space_from_plain(part) for key, part in value["parts"].items()}
            # a plain dict would be sorted by key, and networks read the parts in the order of the space
            return spaces.Dict(OrderedDict(parts)) if kind == "Dict" else spaces.Tuple(list(parts.values()))


def spaces_from_plain(described: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Returns the observation space and the action space that a checkpoint describes.

    Raises:
        CheckpointError: It describes something else.
    """
    try:
        observation_space, action_space = map(space_from_plain, described)
    except Exception as error:  # each space has checks of its own, some of them assertions
        raise incomplete(f"spaces: {type(error).__name__}: {error}") from error
    return observation_space, action_space


def _packed(bounds: np.ndarray[Any, Any]) -> torch.Tensor:
    """Returns bounds as a tensor, one number if all are equal."""
    return torch.tensor(np.array(bounds.flat[0]) if bounds.size and (bounds == bounds.flat[0]).all() else bounds)


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
