"""Files that are whole or not there (written beside their place, flushed, and renamed), and plain values for them."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rayvec.errors import ConfigError

__all__ = ["finite", "local_path", "written_whole"]

_UNWRITABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
"""What the system answers where a file can't be made, however much room there is."""


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that takes the place of `path` once the block ends.

    A process that is killed leaves the old file or the new one. If the block raises, or the disk is full, the old
    file stays and the partial one (``path`` with ``.tmp`` added to its name) is removed.

    Args:
        path: The file to replace, or to make.

    Raises:
        ConfigError: `path` is a directory or a device, its directory does not exist, or no file can be made there.
        OSError: The disk is full, or fails. It names the file.
    """
    path = local_path(path)
    is_other = os.path.exists(path) and not os.path.isfile(path)
    if is_other or not os.path.isdir(path.parent):
        other = "a directory" if os.path.isdir(path) else "a device or a pipe"
        raise ConfigError(
            f"{path} can't be written: "
            f"{f'it is {other}' if is_other else f'there is no directory {path.parent}'}. Pass the path of a file "
            "in a directory that exists."
        )
    partial = path.with_name(path.name + ".tmp")
    try:
        with _opened(partial, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    _sync_directory(path.parent)


def _opened(partial: Path, path: Path) -> BinaryIO:
    """Returns a new file, which is to take the place of `path`.

    Raises:
        ConfigError: It can't be made.
    """
    try:
        return partial.open("wb")
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise ConfigError(
            f"{path} can't be written: {error.strerror}. Let this user write to {path.parent}, or pass another path."
        ) from error


def local_path(path: Path | str) -> Path:
    """Returns the path of a file or directory, "~" expanded.

    Raises:
        ConfigError: It is a URI.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise ConfigError(
            f"The path {os.fspath(path)!r} is a URI. Files are written to and read from mounted file systems only: "
            "pass a path of this machine, and copy the directory of the run afterwards."
        )
    return Path(path).expanduser()


def finite(value: Any) -> Any:
    """Returns a plain value with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float | int) and not math.isfinite(value) else value


def _sync_directory(directory: Path) -> None:
    """Makes a rename in `directory` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
