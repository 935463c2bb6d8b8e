"""Objects through a pipe, their large arrays through shared memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from rayvec.pools.memory import ALIGN_BYTES, SharedBlock

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

        head = dumps(value, keep_small, buffers.clear)
        if not buffers:
            self._pipe.send_bytes(b"\0" + head)
            return
        bounds = np.cumsum([0, *(-(-view.nbytes // ALIGN_BYTES) * ALIGN_BYTES for view in buffers)]).tolist()
        fresh = self._ensure(bounds[-1])
        assert self._block is not None
        target = self._block.arrays["bytes"]
        for start, view in zip(bounds, buffers, strict=False):
            target[start : start + view.nbytes] = np.frombuffer(view, np.uint8)
        places = [(start, view.nbytes) for start, view in zip(bounds, buffers, strict=False)]
        self._pipe.send_bytes(b"\1" + pickle.dumps((head, places, self._block.fields if fresh else None)))
        if fresh:
            reduction.send_handle(self._pipe, self._block.fd, None)

    def _ensure(self, num_bytes: int) -> bool:
        if self._block is not None and self._block.arrays["bytes"].nbytes >= num_bytes:
            return False
        if self._block is not None:
            self._block.close()
        self._block = SharedBlock({"bytes": (np.uint8, (num_bytes,))})
        return True


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
