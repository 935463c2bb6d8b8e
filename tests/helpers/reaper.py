"""Cleans up after a private Ray cluster of a test, even if the process that started the cluster was killed.

This script takes three arguments: the name of an environment variable, a directory, and the process id of the starter.
It waits until the starter writes to the script's standard input, closes it, or exits. Standard input alone is not
enough, because child processes of the starter keep it open. The script then kills the cluster's processes and removes
the directory.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time

CLUSTER_MARK = "RAYVEC_CLUSTER"
"""Environment variable that holds the directory of a private cluster, set in the cluster's processes."""
_ROUNDS = 100
_PAUSE_S = 0.05
_QUIET_ROUNDS = 4


def _belongs(pid: int, variable: str, directory: str) -> bool:
    """Whether a process belongs to the cluster.

    It does if its environment sets the variable to the directory, if its standard output or standard error is a file in
    the directory, or if it is a Ray process with an open file there. The environment alone is not enough: Ray's workers
    and agents overwrite it with their process titles. A process that only reads a log of the cluster, or inherited an
    open log from the starter, does not belong to the cluster.
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
    except OSError:  # the process has exited, or belongs to another user
        return False


def processes(variable: str, directory: str) -> list[int]:
    """Returns the ids of the cluster's remaining processes, except this one."""
    pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - {os.getpid()}
    return [pid for pid in sorted(pids) if _belongs(pid, variable, directory)]


def _wait_for_end(starter: int) -> None:
    """Waits until the starter writes to standard input, closes it, or exits."""
    try:
        watch = os.pidfd_open(starter)
    except ProcessLookupError:
        return
    if os.getppid() == starter:  # else the starter has exited and its id may be reused
        select.select([0, watch], [], [])


def main(variable: str, directory: str, starter: str) -> None:
    """Waits for the starter, then kills the cluster's processes and removes its directory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wait_for_end(int(starter))
    quiet = 0
    for _ in range(_ROUNDS):
        pids = processes(variable, directory)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if pids else quiet + 1
        if quiet == _QUIET_ROUNDS:  # a process that is just starting appears a moment later
            break
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)


def start_reaper(directory: str) -> subprocess.Popen[bytes]:
    """Starts the process that cleans up after a private cluster, even if this process is killed."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, CLUSTER_MARK, directory, str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def end_reaper(reaper: subprocess.Popen[bytes]) -> None:
    """Notifies the reaper, which cleans up as after a crash, and waits until it exits."""
    assert reaper.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the reaper was killed
        reaper.stdin.write(b".")
        reaper.stdin.close()
    reaper.wait(20.0)


if __name__ == "__main__":
    main(*sys.argv[1:4])
