"""How many cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["quota_cores", "usable_cores"]


def usable_cores() -> int:
    """Returns the number of cores that this process may use: its affinity, and at most its container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = quota_cores()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def quota_cores(root: Path = Path("/")) -> float | None:
    """Returns the processor quota of this process's control group and of those around it, in cores; None without one.

    Args:
        root: Directory that holds ``proc`` and ``sys``.
    """
    quotas = []
    for folder in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # version 2; "max" is no quota
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):  # version 1; -1 is no quota
            quota = (folder / "cpu.cfs_quota_us").read_text()
            if int(quota) > 0:
                quotas.append(int(quota) / int((folder / "cpu.cfs_period_us").read_text()))
    return min(quotas, default=None)


def _control_groups(root: Path) -> Iterator[Path]:
    """Yields the directories of the control groups of this process and of those around them, in both versions."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):
                top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
                inner = top / path.lstrip("/")
                yield from (each for each in (inner, *inner.parents) if each == top or top in each.parents)
