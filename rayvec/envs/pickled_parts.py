"""Pickles for worker processes, in an anonymous file that those of a machine share."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from multiprocessing.process import current_process
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

__all__ = ["PickledParts", "Places", "carrying_sys", "load_part", "pickled_for_workers"]

_ALIGNMENT = 64
_LARGE_BYTES = 1 << 15
_INHERITED = "should only be shared between processes through inheritance"
"""In the errors of multiprocessing about its own Value, Lock and Queue."""


class Places(NamedTuple):
    """Where a part lies.

    Attributes:
        spans: Offsets and sizes in the file, in bytes: what changes ``sys``, the factory, then each large array.
        start: Index of the part's first environment.
        stop: Index after its last.
    """

    spans: tuple[tuple[int, int], ...]
    start: int
    stop: int


if "__mp_main__" in sys.modules:  # the script of a process that multiprocessing has spawned: workers can't import it
    cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])


class PickledParts:
    """A pickled factory for the processes of one machine, which share the pages of its arrays until they write to them.

    Ray sends it to another node with its content.

    Args:
        content: The pickle and its large arrays, one after another.
        places: The place of each part.

    Attributes:
        fd: The file, which :meth:`close` closes.
        places: The place of each part.
    """

    def __init__(self, content: Iterable[NDArray[np.uint8]], places: Sequence[Places]) -> None:
        self.fd = os.memfd_create("rayvec-parts", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.places = list(places)
        with open(self.fd, "wb", closefd=False) as file:
            for data in content:
                file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                file.write(data.data)

    @classmethod
    def of(
        cls, pickled: Callable[[Callable[[pickle.PickleBuffer], Any]], bytes], bounds: Sequence[int]
    ) -> PickledParts:
        """Pickles a factory of environments once, for processes that have those between each two of `bounds`."""
        pieces: list[Any] = [carrying_sys(pickle.dumps(None)), b""]

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes >= _LARGE_BYTES:
                pieces.append(buffer.raw())
                return False
            return True

        pieces[1] = pickled(is_small)
        content = [np.frombuffer(piece, np.uint8) for piece in pieces]
        ends = accumulate(-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in content)
        spans = tuple((start, each.nbytes) for start, each in zip((0, *ends), content, strict=False))
        return cls(content, [Places(spans, *pair) for pair in pairwise(bounds)])

    def __reduce__(self) -> tuple[Any, ...]:
        content = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        return PickledParts, ([np.frombuffer(content, np.uint8)], self.places)


def load_part(fd: int, places: Places) -> Any:
    """Returns the factory of one part. Its arrays are copies only of the pages that this process writes to."""
    content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    with_sys, head, *arrays = (content[start : start + size] for start, size in places.spans)
    pickle.loads(with_sys)
    return pickle.loads(head, buffers=arrays).part(places.start, places.stop)


def pickled_for_workers(
    value: Any, what: str, remedy: str, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None
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


def carrying_sys(pickled: bytes) -> bytes:
    """Returns a pickled object together with what multiprocessing's spawn gives to a process.

    Unpickling it first puts this process's ``sys.path`` in front of the other process's, so that it finds the object's
    modules, and replaces the other process's ``sys.argv`` and the key of multiprocessing, which proxies of a
    ``multiprocessing.Manager()`` need.
    """
    return pickle.dumps(_WithSys(pickled))


class _WithSys(NamedTuple):
    """A pickled object that is unpickled when ``sys`` and the key of multiprocessing have been changed."""

    pickled: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        path = [os.path.abspath(entry) if os.path.exists(entry or ".") else entry for entry in sys.path]
        return _load_with_sys, (path, sys.argv, bytes(current_process().authkey), self.pickled)


def _load_with_sys(path: list[str], argv: list[str], authkey: bytes, pickled: bytes) -> Any:
    sys.path[:] = dict.fromkeys([*path, *sys.path])
    sys.argv[:] = argv
    current_process().authkey = authkey
    return pickle.loads(pickled)
