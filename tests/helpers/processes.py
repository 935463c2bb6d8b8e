"""Commands of rayvec in processes of their own, and everything that they started."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

RAYVEC = [sys.executable, "-m", "rayvec"]
DEADLINE_S = 150.0  # a Ray that starts in 5 s needs a minute on a machine with ten times the work


class Command:
    """A running ``rayvec ...``, leader of its own session, with output in files below `directory`."""

    def __init__(self, arguments: list[str], directory: Path) -> None:
        self._mark = f"RAYVEC_TEST_MARK={uuid.uuid4()}".encode()
        name, _, value = self._mark.decode().partition("=")
        environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        self.stdout, self.stderr = directory / "stdout.txt", directory / "stderr.txt"
        with self.stdout.open("w") as stdout, self.stderr.open("w") as stderr:
            self.process = self._start(arguments, directory, {**environment, name: value}, stdout, stderr)

    def _start(
        self, arguments: list[str], directory: Path, environment: dict[str, str], stdout: IO[str], stderr: IO[str]
    ) -> Any:
        return subprocess.Popen(
            [*RAYVEC, *arguments],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
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


class ForkedProcess:
    """A child of this process that runs ``rayvec ...``; used as a ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code."""
        deadline_s = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("rayvec", timeout or 0.0)
            time.sleep(0.005)
        return code


class WarmCommand(Command):
    """A command that is forked from this process, whose imports it has. It can get signals once its `main` runs."""

    def _start(
        self, arguments: list[str], directory: Path, environment: dict[str, str], stdout: IO[str], stderr: IO[str]
    ) -> ForkedProcess:
        from rayvec.cli import main

        pid = os.fork()
        if pid:
            return ForkedProcess(pid)
        os.setsid()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        for file, fd in ((stdout, 1), (stderr, 2)):
            os.dup2(file.fileno(), fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[1:] = arguments
        code: Any = 1
        try:
            try:
                code = main()
            except SystemExit as end:
                code = end.code
            threading._shutdown()  # type: ignore[attr-defined]  # as Python ends
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            traceback.print_exc()
        os._exit(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def running(arguments: list[str], directory: Path, kind: type[Command] = Command) -> Iterator[Command]:
    """Runs a command, and kills what is left of it in the end."""
    command = kind(arguments, directory)
    try:
        yield command
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.process.pid, signal.SIGKILL)
        command.process.wait(DEADLINE_S)


def assert_nothing_left(command: Command) -> None:
    """Waits until nothing lives that the command started, and fails if that does not come true."""
    deadline_s = time.monotonic() + DEADLINE_S
    while left := command.left():
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        time.sleep(0.05)
