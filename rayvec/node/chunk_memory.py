"""Pickles objects for other processes, with the large arrays of chunks in shared memory."""

from __future__ import annotations

import math
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk, ChunkInfos, RolloutTimes, tree_leaves
from rayvec.node.messages import dumps
from rayvec.node.shared_memory import aligned, allocate
from rayvec.pools.base import MOST_CHUNKS

__all__ = ["ChunkMemory", "Packed", "PackedChunk"]

_IN_BAND_BYTES = 1 << 15


class Packed(NamedTuple):
    """A pickled object whose large arrays are stored in a :class:`ChunkMemory`.

    Attributes:
        turn: Index of the piece that holds the arrays.
        head: The pickled object without these arrays.
        places: Offset and size of each array, in bytes.
    """

    turn: int
    head: bytes
    places: tuple[tuple[int, int], ...]


class ChunkMemory:
    """Shared memory for a worker's chunks, with one piece for each of `MOST_CHUNKS` chunks.

    Consecutive chunks alternate between the pieces, so that the pool reads one while the worker writes the next. The
    pool must copy the oldest chunk before it requests another. The worker allocates a chunk's arrays here and writes
    them only once. The pieces have no names and outlive the worker. Each grows to the size of its largest chunk.

    Args:
        fds: File descriptors of existing pieces, which this object then owns and closes. Empty creates new pieces.
    """

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self.fds = tuple(fds) or tuple(os.memfd_create("rayvec", os.MFD_CLOEXEC) for _ in range(MOST_CHUNKS))
        self._pieces = [np.zeros(0, np.uint8)] * len(self.fds)
        self._turn = 0
        self._used = 0  # bytes of the current piece

    def begin(self, turn: int) -> None:
        """Selects the piece for all later allocations and overwrites its previous chunk."""
        self._turn, self._used = turn, 0
        self._map(turn)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Allocates an array, in the current piece if it fits. :meth:`pack` need not copy an array in the piece."""
        dtype = np.dtype(dtype)
        num_bytes = dtype.itemsize * math.prod(shape)
        start, stop = self._used, self._used + aligned(num_bytes)
        if num_bytes < _IN_BAND_BYTES or dtype.hasobject or stop > len(self._pieces[self._turn]):
            return np.empty(shape, dtype)
        self._used = stop
        return self._pieces[self._turn][start : start + num_bytes].view(dtype).reshape(shape)

    def pack(self, value: Any, *, bulk: bool = True) -> Packed:
        """Pickles `value`. If `bulk`, it copies arrays of 32 KiB or more into the piece, unless they are there."""
        arrays: list[NDArray[np.uint8]] = []

        def keep_small(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if not bulk or view.nbytes < _IN_BAND_BYTES:
                return True
            arrays.append(np.frombuffer(view, np.uint8))
            return False

        head = dumps(value, keep_small, arrays.clear)
        starts: list[int] = []
        missing: list[tuple[int, NDArray[np.uint8]]] = []
        piece = self._pieces[self._turn]
        for array in arrays:
            start = array.ctypes.data - piece.ctypes.data
            if not 0 <= start < len(piece):
                start, self._used = self._used, self._used + aligned(array.nbytes)
                missing.append((start, array))
            starts.append(start)
        if self._used > len(piece):
            allocate(self.fds[self._turn], self._used)
            self._map(self._turn)
        for start, array in missing:
            self._pieces[self._turn][start : start + array.nbytes] = array
        return Packed(self._turn, head, tuple((start, a.nbytes) for start, a in zip(starts, arrays, strict=True)))

    def unpack(self, packed: Packed) -> Any:
        """Returns the object. Its large arrays are views of the memory."""
        if any(start + size > len(self._pieces[packed.turn]) for start, size in packed.places):
            self._map(packed.turn)
        piece = self._pieces[packed.turn]
        return pickle.loads(packed.head, buffers=[piece[start : start + size] for start, size in packed.places])

    def _map(self, turn: int) -> None:
        """Maps a piece at its current size. Arrays of an earlier mapping stay valid."""
        size = os.fstat(self.fds[turn]).st_size
        if size > len(self._pieces[turn]):
            self._pieces[turn] = np.frombuffer(mmap.mmap(self.fds[turn], size), np.uint8)

    def close(self) -> None:
        """Closes the file descriptors. The memory is freed once no array refers to it."""
        for fd in self.fds:
            os.close(fd)
        self.fds, self._pieces = (), []


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A chunk in transfer. Its arrays may be in memory that a later chunk overwrites. Its infos never are.

    Attributes:
        packed: The chunk without infos.
        infos: The pickled infos and reset infos.
        times: The times that the worker measured for this chunk.
    """

    packed: Packed
    infos: bytes
    times: RolloutTimes

    @classmethod
    def of(cls, chunk: Chunk, memory: ChunkMemory, times: RolloutTimes) -> PackedChunk:
        """Packs a chunk. If observations are objects, it copies all arrays out of the chunk memory."""
        bulk = not any(leaf.dtype.hasobject for leaf in tree_leaves(chunk.obs))
        packed = memory.pack(replace(chunk, infos=ChunkInfos(), reset_infos=ChunkInfos()), bulk=bulk)
        return cls(packed, dumps((chunk.infos, chunk.reset_infos)), times)

    def unpack(self, memory: ChunkMemory) -> Chunk:
        """Returns the chunk. Its arrays are views of the memory."""
        infos, reset_infos = pickle.loads(self.infos)
        chunk: Chunk = memory.unpack(self.packed)
        return replace(chunk, infos=infos, reset_infos=reset_infos)
