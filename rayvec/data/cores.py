"""How many cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from itertools import product
from pathlib import Path

__all__ = ["quota_cores", "usable_cores"]

_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""The files of version 2 and of version 1 that have a quota and its period."""


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
            folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
            for folder, names in product(folders, _QUOTA_FILES):
                with contextlib.suppress(OSError, ValueError):  # "max" is no quota
                    quota, period = (int(word) for name in names for word in (folder / name).read_text().split())
                    quotas.append(quota / period)
    return min((quota for quota in quotas if quota > 0), default=None)
