"""What is measured runs in a process of its own: in another virtual environment, or with another checkout of rayvec.

A *peer* is a generator function of a task (a dict of plain values). It makes what is measured, yields a function that
does some of it and returns how much, and cleans up. This module needs the standard library alone, so that any
interpreter runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from secrets import token_hex
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
MARK = "RAYVEC_PEER"
"""Environment variable that the processes of a peer have in common, Ray's among them."""


class Measured(NamedTuple):
    """How much was done in a window, its seconds, and the CPU seconds of the peer's processes that live at its end."""

    count: int
    wall_s: float
    cpu_s: float


class PeerProcess:
    """A process that holds a peer.

    Args:
        peer: ``module:function`` of this directory.
        task: For the function.
        python: Interpreter.
        checkout: Directory that rayvec is imported from; by default that of this file.
        environment: Variables in addition to those of this process.

    Attributes:
        missing: Why the peer can't be measured here, such as a library that is not installed; else empty.
        start_s: How long making it took.
    """

    def __init__(
        self,
        peer: str,
        task: Mapping[str, Any],
        python: str = sys.executable,
        checkout: Path = HERE.parent,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")
        path = os.pathsep.join([str(HERE), str(checkout)])
        self._process = subprocess.Popen(
            [python, str(HERE / "peer_process.py"), peer, json.dumps(task)],
            env={
                **os.environ,
                "PYTHONWARNINGS": "ignore",
                **(environment or {}),
                "PYTHONPATH": path,
                MARK: token_hex(8),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process
            cwd=tempfile.gettempdir(),  # a fork server imports from the working directory first
        )
        started = self._answer()
        self.missing, self.start_s = started.get("missing", ""), started.get("start_s", 0.0)

    def measure(self, seconds: float) -> Measured:
        """Lets it work for at least so many seconds, at least once."""
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return Measured(**self._answer())

    def _answer(self) -> Any:
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._log.seek(0)
        self.kill()
        raise SystemExit(f"{' '.join(map(str, self._process.args))} exited:\n{self._log.read()[-2000:]}")  # type: ignore

    def kill(self) -> None:
        """Ends it, and what it has started, by force."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.kill()


def _used_s() -> float:
    """Returns the CPU time of all living processes that were started for this peer, this one included."""
    mark, ticks = f"{MARK}={os.environ[MARK]}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.name != str(os.getpid()) and mark in (process / "environ").read_bytes().split(b"\0"):
                ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _answers(peer: str, task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    made = resolve_name(peer)(task)
    try:
        advance = next(made)
    except (ImportError, LookupError) as error:  # the library is not installed, or lacks the environment
        yield {"missing": str(error)}
        return
    yield {"start_s": time.perf_counter() - began}
    for line in sys.stdin:
        seconds, count, used_s, began = float(line), 0, _used_s(), time.perf_counter()
        while (wall_s := time.perf_counter() - began) < seconds or not count:
            count += advance()
        yield {"count": count, "wall_s": wall_s, "cpu_s": _used_s() - used_s}
    next(made, None)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", buffering=1) as output:
        os.dup2(2, 1)  # what libraries print is no answer
        for answer in _answers(sys.argv[1], json.loads(sys.argv[2])):
            output.write(json.dumps(answer) + "\n")
