"""Arrays, and dicts and tuples of them, in the form that Gymnasium gives a batch of a space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tree", "as_slice", "copied", "object_leaves", "objects", "tree_leaves", "tree_map", "tree_paths"]

Tree = Any
"""An array, or a dict or tuple of trees."""
_IMMUTABLE = (bool, int, float, str, bytes, type(None), np.generic)


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Applies `function` to every array of `tree` and the arrays at the same places of `others`.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": (2, 3)}, {"x": 10, "y": (20, 30)})
    {'x': 11, 'y': (22, 33)}
    """
    if isinstance(tree, dict):
        return {key: tree_map(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(tree_map(function, *values) for values in zip(tree, *others, strict=True))
    return function(tree, *others)


def tree_paths(tree: Tree, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the arrays of `tree` in the order of its keys and places, each after those that lead to it."""
    if isinstance(tree, dict | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tree_paths(value, (*path, key))
    else:
        yield path, tree


def tree_leaves(tree: Tree) -> Iterator[Any]:
    """Yields the arrays of `tree` in the order of its keys and places."""
    return (leaf for _, leaf in tree_paths(tree))


def object_leaves(tree: Tree) -> list[Any]:
    """Returns the arrays of objects of `tree`."""
    return [leaf for leaf in tree_leaves(tree) if leaf.dtype.hasobject]


def as_slice(env_ids: NDArray[np.int64]) -> Any:
    """Returns ids as a slice where they are consecutive, so that indexing gives views; else as they are.

    >>> as_slice(np.array([3, 4, 5])), as_slice(np.array([3, 5]))
    (slice(3, 6, None), array([3, 5]))
    """
    if len(env_ids) == 0:
        return env_ids
    first = int(env_ids[0])
    consecutive = np.array_equal(env_ids, np.arange(first, first + len(env_ids)))
    return slice(first, first + len(env_ids)) if consecutive else env_ids


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """Returns an array of objects, ``[len(values)]``."""
    return np.fromiter(values, object, len(values))


def copied(value: Any) -> Any:
    """Copies a value with all that it holds. What can't be copied, such as a lock, is returned itself."""
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()  # ten times faster than deepcopy for small arrays
    with suppress(Exception):
        return deepcopy(value)
    return value
