"""Environments record when they step, in whatever process that is, and a reader of these records."""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

__all__ = ["Clocked", "Recorder", "read_clocks"]

_REMEMBERED = 8192
"""Rows that are kept of each environment, the newest ones."""
_ROW = struct.Struct("ddd")
_made = itertools.count()


class Recorder:
    """Writes when the steps of one environment began and ended into a file, by this machine's clock.

    Args:
        directory: Where the file goes.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: mmap.mmap | None = None
        self._count = 0

    def write(self, begin: float, is_reset: bool = False) -> None:
        """Records a step or a reset that ends now."""
        if self._file is None:  # not before: the process that makes an environment need not be the one that steps it
            path = Path(self._directory, f"{os.uname().nodename}-{os.getpid()}-{next(_made)}.clock")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(_REMEMBERED * _ROW.size))
            with path.open("r+b") as file:
                self._file = mmap.mmap(file.fileno(), 0)
        _ROW.pack_into(self._file, self._count % _REMEMBERED * _ROW.size, begin, time.monotonic(), is_reset)
        self._count += 1


class Clocked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Any environment, with its steps and resets recorded.

    Args:
        env: The environment.
        directory: Where the records go.
    """

    def __init__(self, env: Any, directory: str) -> None:
        super().__init__(env)
        self._recorder = Recorder(directory)

    def reset(self, **kwargs: Any) -> Any:
        """Resets, which takes time like a step."""
        begin = time.monotonic()
        result = self.env.reset(**kwargs)
        self._recorder.write(begin, is_reset=True)
        return result

    def step(self, action: Any) -> Any:
        """Steps."""
        begin = time.monotonic()
        result = self.env.step(action)
        self._recorder.write(begin)
        return result


def read_clocks(directory: str, within_steps: bool = False) -> dict[int, NDArray[np.float64]]:
    """Returns when the steps of each process of this host began and ended, ``float64 [m, 2]`` in order, by process id.

    Args:
        directory: Where the environments write.
        within_steps: Whether a reset is a part of the step before it; else it counts as a step.
    """
    by_pid: dict[int, list[tuple[NDArray[np.float64], float]]] = {}
    for path in Path(directory).glob(f"{os.uname().nodename}-*.clock"):  # hosts may share the directory
        by_pid.setdefault(int(path.name.split("-")[-2]), []).append(_read(path, within_steps))
    found = {}
    for pid, parts in sorted(by_pid.items()):
        rows = np.concatenate([part for part, _ in parts])
        rows = rows[rows[:, 0] >= max(since for _, since in parts)]
        found[pid] = rows[np.argsort(rows[:, 0])]
    return found


def _read(path: Path, within_steps: bool) -> tuple[NDArray[np.float64], float]:
    """Returns the rows of one environment, and since when they are all there."""
    rows = np.fromfile(path).reshape(-1, 3)
    rows = rows[np.argsort(rows[:, 0])]
    since = float(rows[0, 0])  # 0.0 if the file still has room
    rows = rows[rows[:, 0] > 0.0]
    if not within_steps:
        return rows[:, :2].copy(), since
    is_reset = rows[:, 2] > 0
    steps = rows[~is_reset, :2].copy()
    last_step = np.cumsum(~is_reset) - 1  # of each row
    follows = is_reset & (last_step >= 0)
    steps[last_step[follows], 1] = rows[follows, 1]
    return steps, since
