"""The limit on open files, and what workers need of it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from rayvec.errors import LIMITS_REMEDY, ConfigError, WorkerLostError

__all__ = ["FILES_OF_A_WORKER", "SPARE_FILES", "allow_open_files", "within_file_limit"]

FILES_OF_A_WORKER = 9
"""The pipe, two of the process, the file for its stack, four of its chunks, and a message."""
SPARE_FILES = 64


def allow_open_files(num_workers: int) -> None:
    """Raises this process's soft limit on open files, if it would not allow so many more workers.

    Raises:
        ConfigError: The hard limit does not allow them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + FILES_OF_A_WORKER * num_workers + SPARE_FILES
    if resource.RLIM_INFINITY not in (soft, hard) and needed > hard:
        raise ConfigError(
            f"{num_workers} workers need more open files than a hard limit of {hard} allows. Raise it to at least "
            f"{needed} (ulimit -Hn shows it), or use fewer workers."
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def within_file_limit() -> Iterator[None]:
    """Raises ``WorkerLostError`` where the system refuses this process another file descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise WorkerLostError(f"Chunks lie in files that could not be opened: {error}. {LIMITS_REMEDY}") from error
