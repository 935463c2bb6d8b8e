"""Writes memory, descriptors and processes over time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

MARK = "RAYVEC_SOAK"
"""Name of an environment variable by whose value a soak knows the processes that it started."""
_GROUPS = ("driver", "workers", "actors", "ray", "environments")


class Recorder:
    """Samples every few seconds in a thread.

    Args:
        directory: Where ``samples.jsonl`` is written.
        every_s: Seconds between samples.
        counts: Returns what else to write: transitions and faults.
    """

    def __init__(self, directory: Path, every_s: float, counts: Callable[[], dict[str, Any]]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._every_s, self._counts = directory, every_s, counts
        self.samples: list[dict[str, Any]] = []
        self._begin_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with (self._directory / "samples.jsonl").open("w", buffering=1) as file:
            while not self._stop.wait(self._every_s):
                sample = {"at_s": round(time.monotonic() - self._begin_s, 1), **measure(), **self._counts()}
                self.samples.append(sample)
                file.write(json.dumps(sample) + "\n")

    def close(self) -> None:
        """Stops sampling."""
        self._stop.set()
        self._thread.join()


def marked() -> Iterator[tuple[int, str]]:
    """Yields the process id and the group of every process that this soak started, and of itself."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or belongs to another user
            if not entry.name.isdigit() or mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            command = (entry / "cmdline").read_bytes()
            if command:  # a zombie has none
                yield int(entry.name), _group(int(entry.name), command)


def left() -> list[int]:
    """Returns the process ids that are left beside this process and its fork server, which ends with it."""
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    own = {os.getpid(), *map(int, children.split())}
    return [pid for pid, group in marked() if pid not in own or group not in ("driver", "workers")]


def _group(pid: int, command: bytes) -> str:
    if pid == os.getpid():
        return "driver"
    if b"from multiprocessing" in command:
        return "workers"
    if b"NodeActor" in command or b"RankActor" in command:
        return "actors"
    return "environments" if command.startswith(b"sleep") else "ray"


def measure() -> dict[str, Any]:
    """Returns, by group of processes, their number, memory that is their own (MiB) and descriptors."""
    processes: Counter[str] = Counter(dict.fromkeys(_GROUPS, 0))
    memory: Counter[str] = Counter(dict.fromkeys(_GROUPS, 0))
    descriptors: Counter[str] = Counter(dict.fromkeys(_GROUPS, 0))
    for pid, group in marked():
        with suppress(OSError):  # it has ended meanwhile
            fields = _fields(Path(f"/proc/{pid}/smaps_rollup").read_text())
            own_mib = (fields["Private_Clean"] + fields["Private_Dirty"]) / 1024
            descriptors[group] += len(os.listdir(f"/proc/{pid}/fd"))
            processes[group] += 1
            memory[group] += own_mib
    return {
        "driver_rss_mib": round(_fields(Path("/proc/self/status").read_text())["VmRSS"] / 1024, 2),
        "own_mib": {group: round(value, 2) for group, value in memory.items()},
        "processes": dict(processes),
        "descriptors": dict(descriptors),
        "threads_of_driver": threading.active_count(),
    }


def _fields(text: str) -> dict[str, int]:
    lines = (line.split() for line in text.splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) for parts in lines if len(parts) > 1 and parts[1].isdigit()}


def growth_mib(samples: list[dict[str, Any]], group: str, skip_s: float) -> float:
    """Returns by how much a straight line through the memory of a group rises after the first `skip_s` seconds."""
    late = [sample for sample in samples if sample["at_s"] >= skip_s]
    if len(late) < 2:
        return 0.0
    at_s = np.array([sample["at_s"] for sample in late])
    slope = np.polyfit(at_s, [sample["own_mib"][group] for sample in late], 1)[0]
    return float(slope * (at_s[-1] - at_s[0]))
