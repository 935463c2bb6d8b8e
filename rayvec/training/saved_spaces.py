"""Spaces as tensors and plain values, so that a checkpoint says what its policy observes and does."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rayvec.training.checkpoint import incomplete

__all__ = ["space_from_plain", "space_to_plain", "spaces_from_plain"]


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
