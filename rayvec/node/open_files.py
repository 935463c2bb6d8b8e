"""The limit on open files, and what workers need of it."""

from __future__ import annotations

import os
import resource

from rayvec.errors import ConfigError

__all__ = ["FILES_OF_A_WORKER", "SPARE_FILES", "allow_open_files"]

FILES_OF_A_WORKER = 5
"""The socket, two of the process, the file for its stack, and a message."""
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
