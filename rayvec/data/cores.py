"""How many cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
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
    quotas: list[float] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            top = root / "sys/fs/cgroup"
            if controllers:  # version 1 has a tree for each controller
                top /= "cpu" if "cpu" in controllers.split(",") else "none"
            inner = top / group.lstrip("/")
            quotas += [_quota(folder) for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return min((quota for quota in quotas if quota > 0), default=None)


def _quota(group: Path) -> float:
    """Returns the cores of a control group; not a positive number if it has no quota."""
    with contextlib.suppress(OSError, ValueError):  # "max" is no quota
        quota, period = map(int, (group / "cpu.max").read_text().split())
        return quota / period
    with contextlib.suppress(OSError, ValueError):
        names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
        quota, period = (int((group / name).read_text()) for name in names)
        return quota / period
    return 0.0
