"""Values that processes of one machine pass through memory."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import stat
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle

from rayvec.pools.anonymous_file import allocate

__all__ = ["MemoryFile", "can_open"]

_ALIGNMENT = 64


class MemoryFile:
    """A value as it is now, pickled once into an anonymous file, for the processes of this machine.

    A process that unpickles this object gets the value. It opens the file, whose pages its arrays then share until it
    writes to them. The kernel frees the file after this object and the last of those arrays. A child that this process
    forks does not keep the file.

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
        self._fd = os.memfd_create("rayvec-value", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False
        _all_open.add(self)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        starts = _starts(self._sizes)
        allocate(self._fd, starts[-1] + self._sizes[-1])
        for start, part in zip(starts, parts, strict=True):
            _write(self._fd, part, start)

    def content(self) -> bytes:
        """Returns the bytes of the file."""
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0)

    def value(self) -> Any:
        """Returns a copy of the value."""
        return _read(self._fd, self._sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.path, self._sizes)


_all_open: weakref.WeakSet[MemoryFile] = weakref.WeakSet()


def _close_all() -> None:
    for file in list(_all_open):
        file._close()


os.register_at_fork(after_in_child=_close_all)


def _load(path: str, sizes: Sequence[int]) -> Any:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read(fd, sizes)
    finally:
        os.close(fd)


def _read(fd: int, sizes: Sequence[int]) -> Any:
    """Returns the value in a file; writing to its arrays changes copies of the pages."""
    content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    pickled, *buffers = (content[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True))
    return pickle.loads(pickled, buffers=buffers)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Returns where parts of these sizes begin in a file, each at a multiple of 64 bytes.

    >>> _starts([70, 8, 8])
    [0, 128, 192]
    """
    filled = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return list(itertools.accumulate(filled[:-1], initial=0))


def _write(fd: int, part: memoryview, start: int) -> None:
    while part:  # the kernel takes 2 GiB at a time
        written = os.pwrite(fd, part, start)
        part, start = part[written:], start + written


def can_open(path: str, content: bytes) -> bool:
    """Says whether this process can open a file, and the file consists of these bytes.

    It may find another file under the same path: a process of another container may have the same number.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its other end
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and os.pread(fd, len(content) + 1, 0) == content
    finally:
        os.close(fd)
