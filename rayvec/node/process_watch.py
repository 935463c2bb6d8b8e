"""Waits until a file descriptor is readable, as that of a process is once it has exited."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence

__all__ = ["ProcessWatch", "readable"]

_KILL_S = 10.0
"""How long a process may take to end after SIGKILL, in seconds."""


def readable(fds: Sequence[int], timeout_s: float | None) -> bool:
    """Waits up to `timeout_s` until at least one file descriptor is readable. Returns whether one is."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000.0 * timeout_s))


class ProcessWatch:
    """Detects the exit of any process on this machine, whether or not it is a child of this process.

    Args:
        pid: Process id.
        pidfd: A file descriptor of the process, instead of `pid`. The watch then owns it.
    """

    def __init__(self, pid: int = -1, *, pidfd: int = -1) -> None:
        self._fd = pidfd
        if pidfd < 0:
            with contextlib.suppress(ProcessLookupError):
                self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Returns the process's file descriptor, readable once the process has exited. -1 if there is no process."""
        return self._fd

    def ended(self) -> bool:
        """Whether the process has exited."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` until the process has exited. Returns whether it has."""
        return self._fd < 0 or readable([self._fd], timeout_s)

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has exited."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """Kills the process and waits until it has exited."""
        self.signal(signal.SIGKILL)
        self.wait(_KILL_S)

    def close(self) -> None:
        """Closes the file descriptor of the process."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
