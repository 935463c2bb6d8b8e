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
    """Returns the processor quota of this process's control group (version 2) and of those around it, in cores.

    Args:
        root: Directory that holds ``proc`` and ``sys``.

    Returns:
        The smallest quota, or None without one.
    """
    quotas: list[float] = []
    top = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        inner = top / (root / "proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top):
                with contextlib.suppress(OSError, ValueError):  # "max" is no quota
                    quota, period = map(int, (folder / "cpu.max").read_text().split())
                    quotas.append(quota / period)
    return min(quotas, default=None)
