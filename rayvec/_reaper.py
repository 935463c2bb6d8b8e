"""Clears up after a private Ray cluster, whatever became of the process that started it.

Run as a script with the name of an environment variable and a directory. It waits until its standard
input ends, which happens when the starting process closes it or dies. Then it kills every process
that was started with the variable set to the directory, and removes the directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

_ROUNDS = 100
_PAUSE_S = 0.05


def _processes(marks: tuple[bytes, ...]) -> list[int]:
    """Returns the processes whose environment or command line carries one of the marks."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        for name in ("environ", "cmdline"):
            try:
                with open(f"/proc/{entry}/{name}", "rb") as file:
                    content = file.read()
            except OSError:
                continue
            if any(mark in content for mark in marks):
                found.append(int(entry))
                break
    return found


def main(variable: str, directory: str) -> None:
    """Waits for the end of standard input, then kills and removes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    marks = (f"{variable}={directory}".encode() + b"\0", f"{directory}/".encode())
    for _ in range(_ROUNDS):
        pids = _processes(marks)
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
