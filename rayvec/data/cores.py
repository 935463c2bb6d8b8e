"""How many cores this process may use: those of its machine, or its share of them."""

from __future__ import annotations

import contextlib
import math
import os
from itertools import product
from pathlib import Path

_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""The files of version 2 and of version 1 that have a quota and its period."""
_given: list[int] = []


def usable_cores() -> int:
    """Returns the number of cores that this process may use: its affinity, and at most its container's quota.

    Where it was given a share of a machine by :func:`give_cores`, it is that.
    """
    if _given:
        return _given[-1]
    cores, quota = len(os.sched_getaffinity(0)), quota_cores()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def give_cores(count: int) -> None:
    """Gives this process a number of cores of its machine, which it shares with others of its kind."""
    _given.append(count)


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
