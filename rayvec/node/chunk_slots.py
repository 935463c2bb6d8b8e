"""Memory for chunks: the workers of a machine write their columns of the same arrays ``[T, N, ...]``.

A slot is an anonymous file that holds one chunk, and before it the weights that its policy acts with. Each worker
allocates the arrays of the chunk in the same order, so they lie at the same places for all of them. An array that the
slot has no room for, or that holds objects, travels with the worker's answer.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk, tree_map
from rayvec.data.chunk import AXES
from rayvec.node.shared_memory import aligned, allocate
from rayvec.rollout.policy_host import ChunkPlace

__all__ = ["ChunkColumns", "ChunkSlot"]

_STEPS = [name for name, axes in AXES.items() if axes == "T, N"]
_WEIGHT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Placed:
    """An array of a chunk, as it lies in a slot."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class ChunkSlot:
    """One slot. The machine's fleet and each worker hold an object of this class.

    Args:
        fd: File descriptor of an existing slot, which this object owns; None creates a new one.

    Attributes:
        num_bytes: How many bytes the largest chunk so far has asked for.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("rayvec-chunk", os.MFD_CLOEXEC) if fd is None else fd
        self.num_bytes = 0
        self._content = np.zeros(0, np.uint8)

    def prepare(self, weights: NDArray[np.float32] | None, chunk_bytes: int) -> int:
        """Makes room for a chunk, and writes the weights. Returns how many there are."""
        count = 0 if weights is None else weights.size
        num_bytes = max(self.num_bytes, aligned(count * _WEIGHT_BYTES) + chunk_bytes)
        if num_bytes > os.fstat(self.fd).st_size:
            allocate(self.fd, num_bytes)
        self.map()
        if weights is not None:
            self.weights(count)[:] = weights
        return count

    def map(self) -> None:
        """Maps the slot at its present size. Arrays of an earlier mapping stay valid."""
        size = os.fstat(self.fd).st_size
        if size > len(self._content):
            self._content = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)

    def weights(self, count: int) -> NDArray[np.float32]:
        """Returns a view of the weights."""
        return self._content[: count * _WEIGHT_BYTES].view(np.float32)

    def room(self, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Returns an array that begins at a byte; None, if it does not fit, or holds objects."""
        stop = start + dtype.itemsize * math.prod(shape)
        if dtype.hasobject or stop > len(self._content):
            return None
        return self._content[start:stop].view(dtype).reshape(shape)

    def pack(self, chunk: Chunk) -> Chunk:
        """Returns a chunk with the places of its arrays in the slot instead of these."""
        base = self._content.ctypes.data

        def place(array: NDArray[Any]) -> Any:
            offset = array.ctypes.data - base
            is_here = 0 <= offset < len(self._content)
            return _Placed(offset, array.dtype, array.shape, array.strides) if is_here else array

        return replace(chunk, **{name: tree_map(place, getattr(chunk, name)) for name in _STEPS})

    def unpack(self, chunk: Chunk) -> Chunk:
        """Returns the chunk that a worker has packed. Its arrays are views of the slot."""

        def read(each: Any) -> Any:
            if not isinstance(each, _Placed):
                return each
            return np.ndarray(each.shape, each.dtype, self._content, each.offset, each.strides)

        return replace(chunk, **{name: tree_map(read, getattr(chunk, name)) for name in _STEPS})

    def close(self) -> None:
        """Closes the file descriptor. The memory is freed once no array refers to it."""
        os.close(self.fd)


class ChunkColumns:
    """Allocates the arrays of a worker's part of a chunk.

    Args:
        slot: Where they lie.
        place: What the machine's fleet says of the chunk.
        rows: The machine's rows of the worker's environments.

    Attributes:
        num_bytes: The bytes up to the end of the last array that all workers together have.
    """

    def __init__(self, slot: ChunkSlot, place: ChunkPlace, rows: slice) -> None:
        self._slot, self._num_envs = slot, place.num_envs
        self._columns = slice(rows.start - place.first_row, rows.stop - place.first_row)
        self.num_bytes = aligned(place.num_weights * _WEIGHT_BYTES)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Allocates the worker's columns ``[T, n, ...]`` of an array ``[T, N, ...]``."""
        dtype, whole = np.dtype(dtype), (shape[0], self._num_envs, *shape[2:])
        start = self.num_bytes
        self.num_bytes += aligned(dtype.itemsize * math.prod(whole))
        array = self._slot.room(start, dtype, whole)
        return np.empty(shape, dtype) if array is None else array[:, self._columns]
