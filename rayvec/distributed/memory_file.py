"""Values that processes of one machine pass through memory."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle

from rayvec.node.shared_memory import anonymous_file

__all__ = ["MemoryFile"]

_ALIGNMENT = 64


class MemoryFile:
    """A value as it is now, pickled once into an anonymous file, for the processes of this machine.

    A process that unpickles this object gets the value. It opens the file, whose pages its arrays then share until it
    writes to them. The kernel frees the file after this object and the last of those arrays.

    Args:
        value: Anything that cloudpickle takes. Readers share the memory of contiguous arrays, and copy others.

    Attributes:
        path: Of the file, for processes of the same user, as long as this object lives.
    """

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        self._sizes = tuple(part.nbytes for part in parts)
        starts = _starts(self._sizes)
        fd = anonymous_file("rayvec-value", starts[-1] + self._sizes[-1])
        weakref.finalize(self, os.close, fd).atexit = False
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        with mmap.mmap(fd, 0) as content:
            for start, part in zip(starts, parts, strict=True):
                content[start : start + part.nbytes] = part

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.path, self._sizes)


def _load(path: str, sizes: Sequence[int]) -> Any:
    """Returns the value in a file; writing to its arrays changes copies of the pages."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    finally:
        os.close(fd)
    pickled, *buffers = (content[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True))
    return pickle.loads(pickled, buffers=buffers)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Returns where parts of these sizes begin in a file, each at a multiple of 64 bytes.

    >>> _starts([70, 8, 8])
    [0, 128, 192]
    """
    filled = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return list(itertools.accumulate(filled[:-1], initial=0))
