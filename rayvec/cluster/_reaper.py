"""Clears up after a private Ray cluster, whatever became of the process that started it.

Run as a script with the name of an environment variable, a directory and the process that starts it. It waits until
that writes to its standard input, closes it, or ends: the input alone would not tell, since whatever the process forks
holds it open. Then it kills the cluster's processes and removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

_ROUNDS = 100
_PAUSE_S = 0.05
_QUIET_ROUNDS = 4


def _belongs(pid: int, variable: str, directory: str) -> bool:
    """Whether a process was started with the variable set to the directory, prints into it, or is Ray's and uses it.

    Its environment alone does not tell: Ray's workers and agents write their titles over it. Somebody who only reads a
    log of the cluster, or has inherited one from the process that started it, is none of its own.
    """
    mark, inside = f"{variable}={directory}".encode() + b"\0", f"{directory}/"
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if mark in file.read():
                return True
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            is_rays = file.read(5) == b"ray::"
        used = [entry.path for entry in os.scandir(f"/proc/{pid}/fd") if is_rays or entry.name in ("1", "2")]
        return any(os.readlink(path).startswith(inside) for path in used)
    except OSError:  # it has ended, or is another user's
        return False


def _processes(variable: str, directory: str) -> list[int]:
    """Returns the processes of the cluster that are left, without this one."""
    pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - {os.getpid()}
    return [pid for pid in sorted(pids) if _belongs(pid, variable, directory)]


def _wait_for_end(starter: int) -> None:
    """Waits until whoever started this process says something, or has ended."""
    try:
        watch = os.pidfd_open(starter)
    except ProcessLookupError:
        return
    if os.getppid() == starter:  # else it ended before, and another has its number
        select.select([0, watch], [], [])


def main(variable: str, directory: str, starter: str) -> None:
    """Waits for the end, then kills and removes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wait_for_end(int(starter))
    quiet = 0
    for _ in range(_ROUNDS):
        pids = _processes(variable, directory)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if pids else quiet + 1
        if quiet == _QUIET_ROUNDS:  # one that is just being started shows a moment later
            break
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
