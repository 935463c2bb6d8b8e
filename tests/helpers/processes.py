"""Commands of rayvec in processes of their own, and everything that they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from helpers.waiting import DEADLINE_S, wait_until

RAYVEC = [sys.executable, "-m", "rayvec"]
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Lets the kernel kill this new process when the thread that has started it ends, however that ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Command:
    """A running ``rayvec ...``, or another program, leader of its own session, with output in files in `directory`.

    It ends with this process.
    """

    def __init__(
        self, arguments: list[str], directory: Path, program: Sequence[str] = RAYVEC, **variables: str
    ) -> None:
        self._mark = f"RAYVEC_TEST_MARK={uuid.uuid4()}".encode()
        name, _, value = self._mark.decode().partition("=")
        environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        self.stdout, self.stderr = directory / "stdout.txt", directory / "stderr.txt"
        with self.stdout.open("w") as stdout, self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*program, *arguments],
                cwd=directory,
                env={**environment, **variables, name: value},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def kill(self, number: signal.Signals) -> int:
        """Sends a signal to the process alone; returns its exit code."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def interrupt(self) -> int:
        """Presses Ctrl-C, which reaches the whole foreground group; returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(DEADLINE_S)

    def is_own(self, variables: list[bytes]) -> bool:
        """Whether a process with these environment variables was started by the command."""
        return self._mark in variables

    def pids(self) -> list[int]:
        """Returns the processes that it started, directly or not, and that live; its own is among them."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.is_own((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
        return found

    def left(self) -> list[str]:
        """Returns the command lines of the processes that it started, directly or not, and that live."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`; fails when the command ends before."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline_s, "the condition never came true"
            time.sleep(0.02)


@contextlib.contextmanager
def running(arguments: list[str], directory: Path, program: Sequence[str] = RAYVEC) -> Iterator[Command]:
    """Runs a command, and kills what is left of it in the end."""
    command = Command(arguments, directory, program)
    try:
        yield command
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.process.pid, signal.SIGKILL)
        command.process.wait(DEADLINE_S)


def assert_nothing_left(command: Command) -> None:
    """Waits until nothing lives that the command started, and fails if that does not come true."""
    wait_until(lambda: not command.left(), command.left)
