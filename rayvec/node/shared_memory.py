"""Shared memory without names: anonymous files, blocks of arrays in them, and semaphores.

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
import resource
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rayvec.errors import ConfigError

if TYPE_CHECKING:
    from rayvec.data.layouts import Field  # which imports Gymnasium

__all__ = ["Semaphore", "SharedBlock", "aligned", "allocate", "anonymous_file", "keep_freed_memory"]

_ALIGN_BYTES = 64
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_MAX = 32 << 20
"""Some versions of glibc always return larger blocks to the system."""
_kept_bytes = 0


def aligned(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to the alignment of arrays in shared memory."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def anonymous_file(name: str, num_bytes: int) -> int:
    """Returns the descriptor of a new anonymous file (``memfd_create``) of this size, filled with zeros.

    Raises:
        ConfigError: The system's limit on the size of files does not allow it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        allocate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def allocate(fd: int, num_bytes: int) -> None:
    """Sets the size of an anonymous file.

    Raises:
        ConfigError: The system's limit on the size of files does not allow it.
    """
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise ConfigError(
            "Processes share memory as anonymous files. The limit on the size of files applies to them.",
            expected=f"a limit of at least {num_bytes} bytes",
            got=f"a limit of {resource.getrlimit(resource.RLIMIT_FSIZE)[0]} bytes",
            remedy="Raise the limit: ulimit -f unlimited.",
        ) from error


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
