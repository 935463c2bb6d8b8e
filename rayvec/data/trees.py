"""Trees: arrays, and dicts and tuples of them, in the form that Gymnasium gives a batch of a space.

A layout says how the values of a space lie in a tree: one leaf for each array, and rows for environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from operator import getitem, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from gymnasium import Space

Tree = Any
"""An array, or a dict or tuple of trees."""
Field = tuple[DTypeLike, tuple[int, ...]]
"""The data type and shape of one array in a block."""
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


def tree_writer(tree: Tree) -> Callable[[int, Any], None]:
    """Returns a function that writes one environment's value into a given row of every array of `tree`.

    A value that does not fit raises an error, and changes no array.
    """
    if isinstance(tree, np.ndarray):
        return _leaf_writer(tree)
    leaves = [(path, array, array.dtype, array.shape[1:]) for path, array in tree_paths(tree)]

    def write(row: int, value: Any) -> None:
        parts = []
        for path, array, dtype, shape in leaves:
            part = value
            try:
                for key in path:
                    part = part[key]
            except (KeyError, TypeError, IndexError):
                raise ValueError(
                    f"An observation is {value!r:.500}. Its space asks for parts of the shapes "
                    f"{tree_map(np.shape, index_tree(tree, 0))}. Correct the environment or its observation_space."
                ) from None
            parts.append((array, fitted(part, dtype, shape)))
        for array, part in parts:
            array[row] = part

    return write


def _leaf_writer(leaf: NDArray[Any]) -> Callable[[int, Any], None]:
    """Returns the function of :func:`tree_writer` for one array."""
    dtype, shape = leaf.dtype, leaf.shape[1:]
    vectors = [row.data for row in leaf] if len(shape) == 1 and not dtype.hasobject else []

    def write(row: int, value: Any) -> None:
        leaf[row] = fitted(value, dtype, shape)

    def write_vector(row: int, value: Any) -> None:
        try:
            vectors[row][:] = value  # of the same data type and shape; a third of what NumPy takes
        except (TypeError, ValueError, NotImplementedError):  # the last for another order of bytes
            write(row, value)

    return write_vector if vectors else write


def fitted(value: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Converts a value to `dtype` and `shape` under the casting rules of ``np.stack(..., out=...)``.

    Raises:
        ValueError: The value has another shape.
        TypeError: The value's data type can't be cast to `dtype`.
    """
    if dtype.hasobject:
        return deepcopy(value)  # environments may reuse the object
    if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
        return value
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(
            f"An environment has returned a value of shape {array.shape}. Its shape must be {shape}. Correct the "
            "environment or its observation_space."
        )
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(
            f"An environment has returned a value of dtype {array.dtype}, which does not fit into {dtype}. Correct the "
            "environment or its observation_space."
        )
    return array


def index_tree(tree: Tree, row: Any) -> Any:
    """Returns the value of one environment, which is one row of every array of `tree`.

    >>> index_tree({"x": [1, 2], "y": ([3, 4], [5, 6])}, 1)
    {'x': 2, 'y': (4, 6)}
    """
    return tree_map(itemgetter(row), tree)


def as_batch(tree: Tree, rows: Any = slice(None), *, copy: bool = True) -> Tree:
    """Returns some rows of observations as Gymnasium batches them: objects in a tuple.

    >>> as_batch(np.array([None, "word"], object))
    (None, 'word')
    """

    def batched(leaf: NDArray[Any]) -> Any:
        if leaf.dtype.hasobject:
            return tuple(deepcopy(leaf[rows].tolist()))
        return leaf[rows].copy() if copy else leaf[rows]

    return tree_map(batched, tree)


def split_actions(actions: Tree, count: int) -> Any:
    """Splits batched actions into a sequence with one action for each environment.

    >>> split_actions({"x": [1, 2]}, 2)
    [{'x': 1}, {'x': 2}]
    """
    if isinstance(actions, (dict, tuple)):
        return [index_tree(actions, row) for row in range(count)]
    return actions


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The array layout of a space, with one leaf for each array of the tree.

    Attributes:
        form: A tree of the form of the space, with an ``np.dtype`` in place of each array.
        leaves: The data type and shape of each leaf, in the order of :func:`rayvec.data.tree_leaves`.
    """

    form: Tree
    leaves: tuple[Field, ...]

    @classmethod
    def of(cls, space: Space[Any]) -> ArrayLayout:
        """Returns the layout of `space`; parts of it that are no arrays of a fixed shape are leaves of objects."""
        form = _form(space)
        return cls(form, tuple((np.dtype(leaf.base), leaf.shape) for leaf in tree_leaves(form)))

    @classmethod
    def of_actions(cls, space: Space[Any]) -> ArrayLayout:
        """Returns the layout of actions: an array of objects, one for each environment, unless arrays hold them."""
        layout, objects = cls.of(space), np.dtype(object)
        return cls(objects, ((objects, ()),)) if layout.objects else layout

    @property
    def objects(self) -> list[int]:
        """The places of the leaves of objects."""
        return [place for place, (dtype, _) in enumerate(self.leaves) if np.dtype(dtype).hasobject]

    def fields(self, name: str, leading: tuple[int, ...]) -> dict[str, Field]:
        """Returns the fields of a block for all leaves but those of objects, with leading axes before each shape."""
        arrays = [(i, field) for i, field in enumerate(self.leaves) if i not in self.objects]
        return {f"{name}.{i}": (dtype, (*leading, *shape)) for i, (dtype, shape) in arrays}

    def tree(self, arrays: Sequence[Any]) -> Tree:
        """Builds a tree with the structure of the space from one value for each leaf. Inverse of :meth:`flatten`."""
        each = iter(arrays)
        return tree_map(lambda _: next(each), self.form)

    def flatten(self, value: Any) -> list[Any]:
        """Returns the leaves of `value`, a tree of this space, in the order of `leaves`.

        Raises:
            ValueError: `value` does not have the structure of the space.
        """
        try:
            return [reduce(getitem, path, value) for path, _ in tree_paths(self.form)]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"not of the form {tree_map(str, self.form)}: {value!r}"[:500]) from None

    def select(self, block: Mapping[str, NDArray[Any]], name: str) -> Tree:
        """Returns the tree of the arrays in `block` whose names come from :meth:`fields`."""
        return self.tree([block[f"{name}.{i}"] for i in range(len(self.leaves))])

    def empty(self, leading: tuple[int, ...]) -> Tree:
        """Allocates and returns a tree of zeros with these leading axes."""
        return self.tree(
            [
                np.full((*leading, *shape), None if np.dtype(dtype).hasobject else 0, dtype)
                for dtype, shape in self.leaves
            ]
        )


def _form(space: Space[Any]) -> Tree:
    """Returns a tree of the form of a space, with the data type and shape of each array in one ``np.dtype``."""
    from gymnasium import spaces  # processes without environments use trees too

    if isinstance(space, spaces.Dict):
        return {key: _form(child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_form, space.spaces))
    arrays = spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary
    is_array = isinstance(space, arrays) and space.shape is not None and space.dtype is not None
    return np.dtype((space.dtype, space.shape)) if is_array else np.dtype(object)
