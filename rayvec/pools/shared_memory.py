"""Shared memory without names: memfd blocks, array layouts of spaces, and semaphores.

A block is an anonymous file (``memfd_create``). It has no name, so it can't leak in ``/dev/shm``. The kernel frees it
when the last process that maps it ends. For the same reason, semaphores are unnamed POSIX semaphores inside a block.
Both need Linux.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Tree, tree_leaves, tree_map
from rayvec.errors import message
from rayvec.pools.anonymous_file import anonymous_file

__all__ = [
    "ArrayLayout",
    "Field",
    "Semaphore",
    "SharedBlock",
    "aligned",
    "index_tree",
    "keep_freed_memory",
    "split_actions",
    "tree_writer",
]

_ALIGN_BYTES = 64
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_MAX = 32 << 20
"""Some versions of glibc always return larger blocks to the system."""
_kept_bytes = 0
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

Field = tuple[DTypeLike, tuple[int, ...]]
"""The data type and shape of one array in a block."""


def aligned(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to the alignment of arrays in shared memory."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class SharedBlock:
    """Named arrays in one piece of shared memory.

    Args:
        fields: The name, data type and shape of each array. Both sides must pass the same fields.
        fd: The file descriptor of an existing block, which this object then owns and closes. None creates a new
            block filled with zeros.
    """

    def __init__(self, fields: Mapping[str, Field], fd: int | None = None) -> None:
        self.fields = dict(fields)
        self._offsets, size = dict[str, int](), 0
        for name, (dtype, shape) in self.fields.items():
            self._offsets[name] = size
            size += aligned(np.dtype(dtype).itemsize * math.prod(shape))
        self.fd = anonymous_file("rayvec", max(size, _ALIGN_BYTES)) if fd is None else fd
        buffer = mmap.mmap(self.fd, max(size, _ALIGN_BYTES))
        self._address = np.frombuffer(buffer, np.uint8).ctypes.data
        self.arrays: dict[str, NDArray[Any]] = {
            name: np.frombuffer(buffer, np.dtype(dtype), math.prod(shape), self._offsets[name]).reshape(shape)
            for name, (dtype, shape) in self.fields.items()
        }

    def address(self, name: str, row: int = 0) -> int:
        """Returns the address of one row of an array, for a semaphore in that row."""
        dtype, shape = self.fields[name]
        row_bytes = np.dtype(dtype).itemsize * math.prod(shape[1:])
        return self._address + self._offsets[name] + row * row_bytes

    def close(self) -> None:
        """Closes the file descriptor. The memory is freed once no array refers to it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.arrays = {}


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("sem_post", "sem_trywait"):
    getattr(_libc, _name).argtypes = [ctypes.c_void_p]
_libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_libc.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]
_post, _trywait, _clockwait = _libc.sem_post, _libc.sem_trywait, _libc.sem_clockwait


class Semaphore:
    """An unnamed, process-shared POSIX semaphore at an address in shared memory.

    Args:
        address: The address of its `SIZE` bytes.
        initialise: Whether to initialise the value to 0. Exactly one side must do so.
    """

    SIZE = 64

    def __init__(self, address: int, *, initialise: bool) -> None:
        self._address = address
        if initialise:
            self.initialise()

    def initialise(self) -> None:
        """Initialises the value to 0. No thread may be waiting on the semaphore."""
        if _libc.sem_init(self._address, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def post(self) -> None:
        """Increments the value and wakes one waiting thread."""
        _post(self._address)

    def try_acquire(self) -> bool:
        """Decrements the value if it is positive. Returns whether it did."""
        return bool(_trywait(self._address) == 0)

    def acquire(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` to decrement the value. Returns whether it did. A signal ends the wait early."""
        if _trywait(self._address) == 0:
            return True
        until = time.monotonic() + timeout_s
        seconds = int(until)
        timespec = _Timespec(seconds, int((until - seconds) * 1e9))
        if _clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(timespec)) == 0:
            return True
        if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise OSError(ctypes.get_errno(), "sem_clockwait failed")


def keep_freed_memory(most_bytes: int) -> None:
    """Lets this process keep freed blocks of up to `most_bytes`, and as much at the end of the heap.

    What is allocated at every step or update is freed soon after. If it went back to the system each time, each page
    would cost a fault at its next use: a fifth of an update of SAC with 256 units. What an earlier call allowed stays
    allowed. With other C libraries than glibc this does nothing.
    """
    global _kept_bytes
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None and most_bytes > _kept_bytes:
        _kept_bytes = most_bytes
        mallopt(_M_TRIM_THRESHOLD, most_bytes)
        if not mallopt(_M_MMAP_THRESHOLD, most_bytes):
            mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The array layout of a space, with one leaf for each array of the tree.

    Attributes:
        space: The space of one environment.
        leaves: The data type and shape of each leaf, in the order of :func:`rayvec.data.tree_leaves`.
    """

    space: Space[Any]
    leaves: tuple[Field, ...]

    @classmethod
    def of(cls, space: Space[Any]) -> ArrayLayout | None:
        """Returns the layout of `space`, or None if its elements are not arrays of a fixed shape."""
        leaves = _leaves(space)
        return None if leaves is None else cls(space, tuple(leaves))

    def fields(self, name: str, leading: tuple[int, ...]) -> dict[str, Field]:
        """Returns the fields of a block that hold this layout, with leading axes before each shape."""
        return {f"{name}.{i}": (dtype, (*leading, *shape)) for i, (dtype, shape) in enumerate(self.leaves)}

    def tree(self, arrays: Sequence[Any]) -> Tree:
        """Builds a tree with the structure of the space from one value for each leaf. Inverse of :meth:`flatten`."""
        return _build(self.space, iter(arrays))

    def flatten(self, value: Any) -> list[Any]:
        """Returns the leaves of `value`, a tree of this space, in the order of `leaves`.

        Raises:
            ValueError: `value` does not have the structure of the space.
        """
        return _flatten(self.space, value)

    def select(self, block: Mapping[str, NDArray[Any]], name: str) -> Tree:
        """Returns the tree of the arrays in `block` whose names come from :meth:`fields`."""
        return self.tree([block[f"{name}.{i}"] for i in range(len(self.leaves))])

    def empty(self, leading: tuple[int, ...]) -> Tree:
        """Allocates and returns a tree of zeros with these leading axes."""
        return self.tree([np.zeros((*leading, *shape), dtype) for dtype, shape in self.leaves])


def _children(space: Space[Any]) -> list[tuple[Any, Space[Any]]] | None:
    """Returns the parts of a Dict or Tuple space, with their keys or places. None for other spaces."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else None


def _leaves(space: Space[Any]) -> list[Field] | None:
    children = _children(space)
    if children is not None:
        parts = [_leaves(child) for _, child in children]
        return None if None in parts else [leaf for part in parts for leaf in part or ()]
    if isinstance(space, _ARRAYS) and space.shape is not None and space.dtype is not None:
        return [(space.dtype, tuple(space.shape))]
    return None


def _flatten(space: Space[Any], value: Any) -> list[Any]:
    children = _children(space)
    if children is None:
        return [value]
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or set(value) != set(space.spaces):
            raise ValueError(f"not a dict with the keys {list(space.spaces)}: {value!r}"[:500])
    elif not isinstance(value, (tuple, list)) or len(value) != len(children):
        raise ValueError(f"not a tuple of {len(children)}: {value!r}"[:500])
    return [leaf for key, child in children for leaf in _flatten(child, value[key])]


def _build(space: Space[Any], arrays: Iterator[Any]) -> Tree:
    children = _children(space)
    if children is None:
        return next(arrays)
    tree = {key: _build(child, arrays) for key, child in children}
    return tree if isinstance(space, spaces.Dict) else tuple(tree.values())


def tree_writer(tree: Tree) -> Callable[[int, Any], None]:
    """Returns a function that writes one environment's value into a given row of every array of `tree`.

    A value that does not fit raises an error, and changes no array.
    """
    if isinstance(tree, dict | tuple):
        fit, arrays = _fitter(tree), list(tree_leaves(tree))

        def write(row: int, value: Any) -> None:
            for array, part in zip(arrays, fit(value), strict=True):
                array[row] = part

        return write
    array: NDArray[Any] = tree
    dtype, shape = array.dtype, array.shape[1:]
    if dtype.hasobject:
        return lambda row, value: array.__setitem__(row, deepcopy(value))  # environments may reuse the object

    def write_array(row: int, value: Any) -> None:
        if type(value) is not np.ndarray or (value.dtype is not dtype and value.dtype != dtype) or value.shape != shape:
            value = _fitted(value, dtype, shape)
        array[row] = value

    return write_array


def _fitter(tree: Tree) -> Callable[[Any], Sequence[Any]]:
    """Returns a function from one environment's value to what to write into the arrays of `tree`, in their order."""
    if isinstance(tree, dict):
        children = [(key, _fitter(value)) for key, value in tree.items()]

        def fit_dict(value: Any) -> list[Any]:
            fitted: list[Any] = []
            for key, fit in children:
                try:
                    part = value[key]
                except (KeyError, TypeError, IndexError):
                    raise _other_parts(f"a dict with the keys {list(tree)}", value) from None
                fitted += fit(part)
            return fitted

        return fit_dict
    if isinstance(tree, tuple):
        places = [_fitter(value) for value in tree]

        def fit_tuple(value: Any) -> list[Any]:
            try:
                fits = len(value) == len(places)
            except TypeError:
                fits = False
            if not fits:
                raise _other_parts(f"a tuple of {len(places)}", value)
            return [part for fit, item in zip(places, value, strict=True) for part in fit(item)]

        return fit_tuple

    dtype, shape = tree.dtype, tree.shape[1:]
    if dtype.hasobject:
        return lambda value: (deepcopy(value),)

    def fit_array(value: Any) -> tuple[Any]:
        is_fit = type(value) is np.ndarray and value.dtype is dtype and value.shape == shape
        return (value if is_fit else _fitted(value, dtype, shape),)

    return fit_array


def _other_parts(expected: str, value: Any) -> ValueError:
    return ValueError(
        message(
            "An observation of a Dict or Tuple space has the parts of its space.",
            expected=expected,
            got=repr(value)[:500],
            remedy="Correct the environment or its observation_space.",
        )
    )


def _fitted(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Converts a value to `dtype` and `shape` under the casting rules of ``np.stack(..., out=...)``.

    Raises:
        ValueError: The value has another shape.
        TypeError: The value's data type can't be cast to `dtype`.
    """
    fitted = np.asarray(value)
    if fitted.shape != shape:
        raise ValueError(
            message(
                "An observation has the shape of its space.",
                expected=shape,
                got=fitted.shape,
                remedy="Correct the environment or its observation_space.",
            )
        )
    if not np.can_cast(fitted.dtype, dtype, "same_kind"):
        raise TypeError(
            message(
                "An observation has a data type that its space's can hold.",
                expected=dtype,
                got=fitted.dtype,
                remedy="Correct the environment or its observation_space.",
            )
        )
    return fitted


def index_tree(tree: Tree, row: Any) -> Any:
    """Returns the value of one environment, which is one row of every array of `tree`.

    >>> index_tree({"x": [1, 2], "y": ([3, 4], [5, 6])}, 1)
    {'x': 2, 'y': (4, 6)}
    """
    return tree_map(itemgetter(row), tree)


def split_actions(actions: Tree, count: int) -> Any:
    """Splits batched actions into a sequence with one action for each environment.

    >>> split_actions({"x": [1, 2]}, 2)
    [{'x': 1}, {'x': 2}]
    """
    if isinstance(actions, (dict, tuple)):
        return [index_tree(actions, row) for row in range(count)]
    return actions
