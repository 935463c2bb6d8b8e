"""Programs on hosts of one machine (:mod:`rayvec.bench.hosts`), and which tests need such hosts."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayvec.bench.hosts import DEADLINE_S, Host, kill_group, why_not
from rayvec.training.loggers import read_metrics

on_hosts = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=f"hosts in namespaces: {why_not()}"),
]
"""Marks of a module whose tests need hosts."""

long = pytest.mark.skipif("RAYVEC_TEST_HOSTS" not in os.environ, reason="takes minutes: make test-hosts")
"""Marks what `make test-all` leaves to `make test-hosts`."""


class Program:
    """A Python program that runs on a host and prints lines of JSON.

    Args:
        host: Where.
        path: The program.
        arguments: Of the program.
    """

    def __init__(self, host: Host, path: Path, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self.process = host.popen(
            sys.executable,
            str(path),
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):  # Ray prints too
                    self._lines.put(line)
        self._lines.put(None)

    @property
    def log(self) -> str:
        """What the program has written to standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def line(self, limit_s: float = DEADLINE_S) -> Any:
        """Returns the next line; fails if none comes in time or the program has ended."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            line = None
        assert line is not None, f"no line within {limit_s:g} s, exit code {self.process.poll()}:\n{self.log[-4000:]}"
        return json.loads(line)

    def until(self, limit_s: float = DEADLINE_S, **wanted: Any) -> Any:
        """Returns the next line that has these values; skips others."""
        deadline_s = time.monotonic() + limit_s
        while True:
            line = self.line(max(0.0, deadline_s - time.monotonic()))
            if wanted.items() <= line.items():
                return line

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`; fails if the program ends before, or if it takes too long."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log[-4000:]
            time.sleep(0.05)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        kill_group(self.process)
        self._reader.join()
        self._errors.close()


Record = Callable[[str, float], None]


def until_error(program: Program) -> Any:
    """Returns the line with the error that ends a program."""
    line = program.line()
    while "error" not in line:
        line = program.line()
    return line


def lines_of(metrics: Path) -> int:
    """Returns how many lines of metrics a run has written."""
    return sum(1 for _ in read_metrics(metrics)) if metrics.exists() else 0
