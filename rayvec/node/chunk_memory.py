"""Objects for other processes: pickled, and the large arrays of chunks in shared memory."""

from __future__ import annotations

import math
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk, ChunkInfos, RolloutTimes, tree_leaves
from rayvec.pools.memory import aligned

__all__ = ["MOST_CHUNKS", "ChunkMemory", "Packed", "PackedChunk", "dumps"]

MOST_CHUNKS = 2
"""How many chunks of a worker may be under way, or lie in its memory: one that is taken and one that is copied."""

_IN_BAND_BYTES = 1 << 15


def dumps(
    value: Any,
    buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
    start_again: Callable[[], None] = lambda: None,
) -> bytes:
    """Pickles for another process; functions and classes of a main module, which that has not, go by value.

    Args:
        value: What to pickle.
        buffer_callback: As of ``pickle.dumps``.
        start_again: Called before a second attempt, to forget the buffers of the first.
    """
    try:
        data = pickle.dumps(value, 5, buffer_callback=buffer_callback)
        if b"__main__" not in data:
            return data
    except Exception:  # a local function, say: cloudpickle can
        pass
    start_again()
    by_value: bytes = cloudpickle.dumps(value, 5, buffer_callback=buffer_callback)
    return by_value


class Packed(NamedTuple):
    """An object whose large arrays lie in a :class:`ChunkMemory`.

    Attributes:
        turn: In which piece of it.
        head: The pickled rest.
        places: Of each of these arrays, where it begins and how many bytes it has.
    """

    turn: int
    head: bytes
    places: tuple[tuple[int, int], ...]


class ChunkMemory:
    """Shared memory in which a worker's chunks lie until somebody has copied them: a piece for each, used by turns.

    Some are read while the worker writes another, so whoever asks for one more must have copied the oldest. The
    worker allocates a chunk's arrays here, so that they are written once. The pieces have no names, and outlive the
    worker; they grow to what the largest chunk needs.

    Args:
        fds: Of existing pieces, which are closed with this object; new ones are made where they are left out.
    """

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self.fds = tuple(fds) or tuple(os.memfd_create("rayvec", os.MFD_CLOEXEC) for _ in range(MOST_CHUNKS))
        self._pieces = [np.zeros(0, np.uint8)] * len(self.fds)
        self._turn = 0
        self._used = 0  # bytes of the piece whose turn it is

    def begin(self, turn: int) -> None:
        """Lets what is allocated and packed from now on lie in one of the pieces, over what was there."""
        self._turn, self._used = turn, 0
        self._map(turn)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Allocates an array, if there is room where it need not be copied when it is packed."""
        dtype = np.dtype(dtype)
        num_bytes = dtype.itemsize * math.prod(shape)
        start, stop = self._used, self._used + aligned(num_bytes)
        if num_bytes < _IN_BAND_BYTES or dtype.hasobject or stop > len(self._pieces[self._turn]):
            return np.empty(shape, dtype)
        self._used = stop
        return self._pieces[self._turn][start : start + num_bytes].view(dtype).reshape(shape)

    def pack(self, value: Any, *, bulk: bool = True) -> Packed:
        """Pickles `value`; if `bulk`, arrays of 32 KiB or more are copied to the memory, unless they lie there."""
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
            os.ftruncate(self.fds[self._turn], self._used)
            self._map(self._turn)
        for start, array in missing:
            self._pieces[self._turn][start : start + array.nbytes] = array
        return Packed(self._turn, head, tuple((start, a.nbytes) for start, a in zip(starts, arrays, strict=True)))

    def unpack(self, packed: Packed) -> Any:
        """Returns the object; its large arrays are views of the memory."""
        if any(start + size > len(self._pieces[packed.turn]) for start, size in packed.places):
            self._map(packed.turn)
        piece = self._pieces[packed.turn]
        return pickle.loads(packed.head, buffers=[piece[start : start + size] for start, size in packed.places])

    def _map(self, turn: int) -> None:
        """Maps a piece as large as it is now; arrays over what was mapped before stay what they are."""
        size = os.fstat(self.fds[turn]).st_size
        if size > len(self._pieces[turn]):
            self._pieces[turn] = np.frombuffer(mmap.mmap(self.fds[turn], size), np.uint8)

    def close(self) -> None:
        """Gives the file descriptors back; the memory goes when the last array over it does."""
        for fd in self.fds:
            os.close(fd)
        self.fds, self._pieces = (), []


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A chunk on its way: its arrays may lie in memory that is used again, its infos not.

    Attributes:
        packed: The chunk without infos.
        infos: Those, pickled.
        times: Of the worker that took it.
    """

    packed: Packed
    infos: bytes
    times: RolloutTimes

    @classmethod
    def of(cls, chunk: Chunk, memory: ChunkMemory, times: RolloutTimes) -> PackedChunk:
        """Packs a chunk; observations that are objects are not left in memory that is used again."""
        bulk = not any(leaf.dtype.hasobject for leaf in tree_leaves(chunk.obs))
        packed = memory.pack(replace(chunk, infos=ChunkInfos(), reset_infos=ChunkInfos()), bulk=bulk)
        return cls(packed, dumps((chunk.infos, chunk.reset_infos)), times)

    def unpack(self, memory: ChunkMemory) -> Chunk:
        """Returns the chunk; its arrays are still views."""
        infos, reset_infos = pickle.loads(self.infos)
        chunk: Chunk = memory.unpack(self.packed)
        return replace(chunk, infos=infos, reset_infos=reset_infos)
