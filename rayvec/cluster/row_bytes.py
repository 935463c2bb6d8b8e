"""The rows of arrays as bytes, to send them, or to receive into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.trees import as_slice, tree_leaves

__all__ = ["RowBytes", "bytes_of", "result_leaves"]

_MAX_KNOWN = 64
_RESULTS = ("rew", "terminated", "truncated", "episode")
"""What answers carry of each environment, before its observation."""


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Returns the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def result_leaves(arrays: dict[str, Any]) -> list[NDArray[Any]]:
    """Returns what an answer carries of the arrays of a fleet: results, states of episodes, and observations."""
    return [*(arrays[name] for name in _RESULTS), *tree_leaves(arrays["obs"])]


class RowBytes:
    """The answers of environments: some rows of the results, and of those observations that are no objects.

    Args:
        arrays: The arrays of a fleet.
    """

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._leaves = [leaf for leaf in result_leaves(arrays) if not leaf.dtype.hasobject]
        self._known: dict[bytes, list[memoryview] | None] = {}

    def _views(self, rows: NDArray[np.int64]) -> list[memoryview] | None:
        """Returns the memory of consecutive rows; None, if they are not consecutive."""
        key = rows.tobytes()
        if key not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            select = as_slice(rows)
            is_slice = isinstance(select, slice)
            self._known[key] = [bytes_of(leaf[select]) for leaf in self._leaves] if is_slice else None
        return self._known[key]

    def read(self, rows: NDArray[np.int64]) -> Iterator[memoryview]:
        """Returns the bytes of rows, leaf after leaf."""
        views = self._views(rows)
        return iter(views) if views is not None else (bytes_of(leaf[rows]) for leaf in self._leaves)

    def write(self, rows: NDArray[np.int64], fill: Callable[[memoryview], None]) -> None:
        """Lets `fill` write the bytes of rows, leaf after leaf."""
        views = self._views(rows)
        for view in views or ():
            fill(view)
        if views is None:
            for leaf in self._leaves:
                part = np.empty((len(rows), *leaf.shape[1:]), leaf.dtype)
                fill(bytes_of(part))
                leaf[rows] = part
