"""A module that fork servers preload: there, ``os.fork`` fails while a file of this name exists."""

from __future__ import annotations

import errno
import os

FILE_VARIABLE = "RAYVEC_TEST_FORK_FAILS"

_fork = os.fork
_file = os.environ.get(FILE_VARIABLE)


def _fork_or_fail() -> int:
    if os.path.exists(_file):  # type: ignore[arg-type]
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return _fork()


if _file is not None:
    os.fork = _fork_or_fail
