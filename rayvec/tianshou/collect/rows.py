"""Writes rows of a chunk into the arrays of a buffer, at any places, as ``Batch.__setitem__`` would."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tianshou.data import Batch

__all__ = ["Place", "assign", "clear", "lacks"]


class Place:
    """Where rows ``[S, N]`` go, and which of them."""

    def __init__(self, index: NDArray[np.int64], keep: NDArray[np.bool_]) -> None:
        self.rows = None if keep.all() else np.flatnonzero(keep)
        self.index = index.reshape(-1) if self.rows is None else index.reshape(-1)[self.rows]
        self.num_axes = index.ndim


def assign(held: Any, value: Any, place: Place) -> None:
    """Writes rows of `value`; a key that it lacks becomes 0 or None, as in ``Batch.__setitem__``."""
    if isinstance(held, Batch):
        for key, part in held.items():
            if key in value:
                assign(part, value[key], place)
            else:
                clear(part, place.index)
        return
    rows = value.reshape(-1, *value.shape[place.num_axes :])
    if isinstance(held, torch.Tensor):
        rows = torch.as_tensor(rows)
        held[torch.from_numpy(place.index)] = rows if place.rows is None else rows[torch.from_numpy(place.rows)]
    else:
        held[place.index] = rows if place.rows is None else rows[place.rows]


def clear(held: Any, index: NDArray[np.int64]) -> None:
    """Writes 0 or None."""
    if isinstance(held, Batch):
        held.empty_(index)
    else:
        held[index] = None if isinstance(held, np.ndarray) and held.dtype == object else 0


def lacks(held: Any, template: Any) -> bool:
    """Says whether a batch has not got every key of another."""
    for key, part in template.items():
        if key not in held:
            return True
        if isinstance(held[key], Batch):
            if isinstance(part, Batch) and lacks(held[key], part):
                return True
            if not isinstance(part, Batch) and not held[key].get_keys():
                return True
    return False
