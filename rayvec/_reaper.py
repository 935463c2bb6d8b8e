"""Clears up after a private Ray cluster, whatever became of the process that started it.

Run as a script with the name of an environment variable and a directory. It waits until its standard
input ends, which happens when the starting process closes it or dies. Then it kills every process
that was started with the variable set to the directory or that uses files in it, and removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

_ROUNDS = 100
_PAUSE_S = 0.05
_QUIET_ROUNDS = 4


def _belongs(pid: int, variable: str, directory: str) -> bool:
    """Whether a process was started with the variable set to the directory, or uses files in it.

    Its environment alone does not tell: Ray's agents write their titles over it.
    """
    mark = f"{variable}={directory}".encode() + b"\0"
    inside = f"{directory}/"
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if mark in file.read():
                return True
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if inside.encode() in file.read():
                return True
        return any(os.readlink(entry.path).startswith(inside) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended, or is another user's
        return False


def _processes(variable: str, directory: str, spared: int) -> list[int]:
    """Returns the processes of the cluster that are left, without this one and `spared`."""
    pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - {os.getpid(), spared}
    return [pid for pid in sorted(pids) if _belongs(pid, variable, directory)]


def main(variable: str, directory: str) -> None:
    """Waits for the end of standard input, then kills and removes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    starter = os.getppid()  # which may go on, and have a log open
    sys.stdin.buffer.read()
    quiet = 0
    for _ in range(_ROUNDS):
        pids = _processes(variable, directory, starter)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if pids else quiet + 1
        if quiet == _QUIET_ROUNDS:  # one that is just being started shows a moment later
            break
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
