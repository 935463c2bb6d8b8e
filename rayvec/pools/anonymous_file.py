"""Anonymous files, in which processes share memory."""

from __future__ import annotations

import errno
import os
import resource

from rayvec.errors import ConfigError

__all__ = ["allocate", "anonymous_file"]


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
