"""Files that are whole or not there (written beside their place, then renamed), and the versions to write there."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rayvec.errors import require


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that takes the place of `path` once the block ends.

    A process that is killed leaves the old file or the new one. If the block raises, or the disk is full, the old
    file stays and the partial one (``path`` with ``.tmp`` added to its name) is removed.

    Args:
        path: The file to replace, or to make.

    Raises:
        ConfigError: `path` is a directory, a pipe or a device, or has no directory.
        OSError: No file can be made there, or the disk is full. It names the file.
    """
    path = local_path(path)
    require(  # renaming would replace a pipe or a device
        path.is_file() or not path.exists(),
        f"{path} can't be written: it is no file. Pass the path of a file.",
    )
    require(path.parent.is_dir(), f"{path} can't be written: there is no directory {path.parent}. Make it first.")
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def local_path(path: Path | str) -> Path:
    """Returns the path of a file or directory, "~" expanded.

    Raises:
        ConfigError: It is a URI.
    """
    require(
        not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)),
        f"The path {os.fspath(path)!r} is a URI. Files are written to and read from mounted file systems only: "
        "pass a path of this machine, and copy the directory of the run afterwards.",
    )
    return Path(path).expanduser()


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, rayvec, and the packages that results depend on."""
    found = {name: importlib.metadata.version(name) for name in ("ray", "gymnasium", "tianshou", "torch", "numpy")}
    return {"python": platform.python_version(), "rayvec": sys.modules["rayvec"].__version__, **found}
