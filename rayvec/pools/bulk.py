"""Objects through a pipe, their large arrays through shared memory."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import DTypeLike, NDArray

from rayvec.pools.memory import SharedBlock, aligned

__all__ = ["BulkReceiver", "BulkSender", "dumps"]

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


class BulkSender:
    """Sends objects through a pipe, and their large arrays through shared memory.

    One block is used again and again: the receiver must have copied what it needs before it asks for
    the next object.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._block: SharedBlock | None = None
        self._used = 0  # bytes of the block

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Allocates an array for the next :meth:`send`, after which it may be written over.

        It lies in the block if there is room for it, as there is where the last objects were as large: then it is
        not copied when it is sent.
        """
        dtype = np.dtype(dtype)
        num_bytes = dtype.itemsize * math.prod(shape)
        start, stop = self._used, self._used + aligned(num_bytes)
        if num_bytes < _IN_BAND_BYTES or dtype.hasobject or self._block is None or stop > self._block.num_bytes:
            return np.empty(shape, dtype)
        self._used = stop
        return self._block.arrays["bytes"][start : start + num_bytes].view(dtype).reshape(shape)

    def send(self, value: Any, *, bulk: bool = False) -> None:
        """Sends `value`; if `bulk`, arrays of 32 KiB or more are copied once, into the block.

        All bulk must go to one receiver, since only the first is told of the block.
        """
        buffers: list[memoryview] = []

        def keep_small(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if not bulk or view.nbytes < _IN_BAND_BYTES:
                return True
            buffers.append(view)
            return False

        try:
            head = dumps(value, keep_small, buffers.clear)
            if not buffers:
                self._pipe.send_bytes(b"\0" + head)
                return
            arrays = [np.frombuffer(view, np.uint8) for view in buffers]
            fresh = self._ensure(arrays)
            assert self._block is not None
            places = [(self._place(array), array.nbytes) for array in arrays]
            self._pipe.send_bytes(b"\1" + pickle.dumps((head, places, self._block.fields if fresh else None)))
            if fresh:
                reduction.send_handle(self._pipe, self._block.fd, None)
        finally:
            self._used = 0

    def _ensure(self, arrays: Sequence[NDArray[np.uint8]]) -> bool:
        """Makes a block with room for all of these, unless those that are not in this one have room in it."""
        if self._block is not None:
            missing = sum(aligned(array.nbytes) for array in arrays if self._block.offset(array) is None)
            if self._used + missing <= self._block.num_bytes:
                return False
            self._block.close()
        self._block = SharedBlock({"bytes": (np.uint8, (sum(aligned(array.nbytes) for array in arrays),))})
        self._used = 0
        return True

    def _place(self, array: NDArray[np.uint8]) -> int:
        """Returns where in the block an array lies, copied if it must be."""
        assert self._block is not None
        start = self._block.offset(array)
        if start is None:
            start, self._used = self._used, self._used + aligned(array.nbytes)
            self._block.arrays["bytes"][start : start + array.nbytes] = array
        return start


class BulkReceiver:
    """The other end of a :class:`BulkSender`. Large arrays are views of the block, not copies."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._block: SharedBlock | None = None

    def recv(self) -> Any:
        """Receives the next object."""
        received = self._pipe.recv_bytes()
        if received[0] == 0:
            return pickle.loads(memoryview(received)[1:])
        head, places, fields = pickle.loads(memoryview(received)[1:])
        if fields is not None:
            self.close()
            self._block = SharedBlock(fields, reduction.recv_handle(self._pipe))
        assert self._block is not None
        target = self._block.arrays["bytes"]
        return pickle.loads(head, buffers=[target[start : start + size] for start, size in places])

    def close(self) -> None:
        """Gives the block back."""
        if self._block is not None:
            self._block.close()
            self._block = None
