"""Waiting for a condition, with a deadline only for the case that it never comes true."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 150.0  # a Ray that starts in 5 s needs a minute on a machine with ten times the work


def wait_until(condition: Callable[[], bool], what: Any = "the condition") -> None:
    """Waits until `condition` is true; fails, with `what` it was or what that returns, if it does not become so."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what() if callable(what) else what}"
        time.sleep(0.02)


def shm_names() -> set[str]:
    """Names in shared memory, apart from those of Ray's object stores: another test process may start a cluster."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("plasma")}


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it ended before the open, or before the read
        return False
