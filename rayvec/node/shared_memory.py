"""Anonymous files, which are shared memory without a name, and freed memory that a process keeps."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_MAX = 32 << 20
"""Some versions of glibc always return larger blocks to the system."""
_kept_bytes = 0


def anonymous_file(name: str, num_bytes: int) -> int:
    """Returns the descriptor of a new anonymous file (``memfd_create``) of this size, filled with zeros.

    It has no path, so it can't stay in ``/dev/shm``: the kernel frees it when the last process that maps it ends.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def keep_freed_memory(most_bytes: int) -> None:
    """Lets this process keep freed blocks of up to `most_bytes`, and as much at the end of the heap.

    What is allocated at every step or update is freed soon after. If it went back to the system each time, each page
    would cost a fault at its next use: a fifth of an update of SAC with 256 units. What an earlier call allowed stays
    allowed. With other C libraries than glibc this does nothing.
    """
    global _kept_bytes
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and most_bytes > _kept_bytes:
        _kept_bytes = most_bytes
        mallopt(_M_TRIM_THRESHOLD, most_bytes)
        if not mallopt(_M_MMAP_THRESHOLD, most_bytes):
            mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)
