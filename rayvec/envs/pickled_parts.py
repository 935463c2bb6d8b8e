"""Pickles for worker processes, in an anonymous file in which an array that several of them refer to lies once."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import current_process
from typing import Any, BinaryIO, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

__all__ = ["PickledParts", "Places", "carrying_sys", "is_small", "load_part", "pickled_for_workers"]

_ALIGNMENT = 64
_LARGE_BYTES = 1 << 15
_INHERITED = "should only be shared between processes through inheritance"
"""In the errors of multiprocessing about its own Value, Lock and Queue."""
Places = tuple[tuple[int, int], ...]
"""Where a part lies in the file, as offsets and sizes in bytes: its pickle, then each of its large arrays."""

if "__mp_main__" in sys.modules:  # the script of a process that multiprocessing has spawned: workers can't import it
    cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])


class PickledParts:
    """Pickled objects for processes of one machine, which share the pages of their arrays until they write to them.

    Ray sends it to another node with its content.

    Args:
        parts: The pickle of each part and its out-of-band buffers. Equal parts in a row may be one object.

    Attributes:
        fd: The file, which :meth:`close` closes.
        places: Where each part lies.
    """

    def __init__(self, parts: Iterable[tuple[bytes, Sequence[pickle.PickleBuffer]]] = ()) -> None:
        self.fd = os.memfd_create("rayvec-parts", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.places: list[Places] = []
        written: dict[tuple[int, int], tuple[int, int]] = {}
        last, kept = None, []
        with open(self.fd, "wb", closefd=False) as file:
            for part in parts:
                if part is not last:
                    last = part
                    places = [_write(file, np.frombuffer(part[0], np.uint8))]
                    for view in (np.frombuffer(buffer.raw(), np.uint8) for buffer in part[1]):
                        kept.append(view)  # so that no later array has the same address
                        key = view.ctypes.data, view.nbytes
                        written[key] = written.get(key) or _write(file, view)
                        places.append(written[key])
                self.places.append(tuple(places))

    def __reduce__(self) -> tuple[Any, ...]:
        content = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        return _received, (np.frombuffer(content, np.uint8), self.places)


def _received(content: NDArray[np.uint8], places: list[Places]) -> PickledParts:
    received = PickledParts()
    with open(received.fd, "wb", closefd=False) as file:
        _write(file, content)
    received.places = places
    return received


def _write(file: BinaryIO, data: NDArray[np.uint8]) -> tuple[int, int]:
    """Appends bytes to a file; returns where they begin, aligned, and how many they are."""
    start = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
    return start, file.write(data.data)


def load_part(fd: int, places: Places) -> Any:
    """Returns the part of a file that lies at these places. Its arrays are copies only of the pages it writes to."""
    content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    head, *arrays = (content[start : start + size] for start, size in places)
    return pickle.loads(head, buffers=arrays)


def is_small(large: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Says whether a buffer is to be pickled in place; others are added to the large ones."""
    if buffer.raw().nbytes >= _LARGE_BYTES:
        large.append(buffer)
        return False
    return True


def pickled_for_workers(
    value: Any, what: str, remedy: str, buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None
) -> bytes:
    """Returns an object by cloudpickle.

    Args:
        value: The object.
        what: What it is to the caller, for the error.
        remedy: What else the caller can do.
        buffer_callback: As of ``pickle.dumps``.

    Raises:
        TypeError: It can't be pickled.
    """
    try:
        data: bytes = cloudpickle.dumps(value, 5, buffer_callback)
    except Exception as error:
        if _INHERITED in str(error):
            remedy = "Use the Value, Lock or Queue of a multiprocessing.Manager(), which workers can share."
        raise TypeError(
            f"Workers get {what} by pickling, which failed: {type(error).__name__}: {error}. {remedy}"
        ) from error
    return data


def carrying_sys(pickled: bytes, buffers: Sequence[pickle.PickleBuffer] = ()) -> bytes:
    """Returns a pickled object together with what multiprocessing's spawn gives to a process.

    Unpickling it first puts this process's ``sys.path`` in front of the other process's, so that it finds the object's
    modules, and replaces the other process's ``sys.argv`` and the key of multiprocessing, which proxies of a
    ``multiprocessing.Manager()`` need.

    Args:
        pickled: The object.
        buffers: Its out-of-band buffers, which are those of the result.
    """
    path = [os.path.abspath(entry) if os.path.exists(entry or ".") else entry for entry in sys.path]
    carried = _WithSys(path, sys.argv, bytes(current_process().authkey), pickled, buffers)
    data: bytes = cloudpickle.dumps(carried, 5, lambda buffer: False)
    return data


class _WithSys(NamedTuple):
    """A pickled object that is unpickled when ``sys`` and the key of multiprocessing have been changed."""

    path: list[str]
    argv: list[str]
    authkey: bytes
    pickled: bytes
    buffers: Sequence[pickle.PickleBuffer]

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_with_sys, tuple(self)


def _load_with_sys(
    path: list[str], argv: list[str], authkey: bytes, pickled: bytes, buffers: Sequence[memoryview]
) -> Any:
    sys.path[:] = dict.fromkeys([*path, *sys.path])
    sys.argv[:] = argv
    current_process().authkey = authkey
    return pickle.loads(pickled, buffers=buffers)
