"""What runs on a node to examine it. Ray ships this module's code, since the node may have another rayvec, or none.

So the module imports the standard library only, and rayvec where a method needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import pickle
import platform
import re
import resource
import shutil
import statistics
import struct
import time
from pathlib import Path
from typing import Any

__all__ = ["NodeProbe", "ping", "read_facts"]

PACKAGES = ("rayvec", "ray", "numpy", "gymnasium", "torch", "tianshou")
_SMALL, _LARGE = 8, 1 << 20
_ROUNDS = 50
_TRANSFER_S = 0.5


def read_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Returns what this process finds on its machine, as plain values.

    Args:
        root: Directory that holds ``proc`` and ``sys``.

    Returns:
        ``versions`` by package, None where it is missing; ``digest`` of the source of rayvec; ``cores`` that the
        process may use, of ``machine_cores``, and ``quota_cores`` of its control group; ``niceness``; ``files_soft``
        and ``files_hard``, -1 without a limit; ``shm_free`` and ``shm_total``, ``memory_free`` and ``memory_limit``,
        in bytes; ``gpus``; ``torch_cuda``, the version of CUDA that torch was built for; ``ports``, the first and last
        port of connections and streams.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm_total = shm_free = 0
    with contextlib.suppress(OSError, ValueError):
        shm_total, _, shm_free = shutil.disk_usage(root / "dev/shm")
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "digest": _digest(),
        "cores": len(os.sched_getaffinity(0)),
        "machine_cores": os.cpu_count() or 1,
        "quota_cores": _quota_cores(root),
        "niceness": os.nice(0),
        "files_soft": soft,
        "files_hard": hard,
        "shm_free": shm_free,
        "shm_total": shm_total,
        "memory_free": _memory_free(root),
        "memory_limit": _smallest(root, "memory", "memory.max", "memory.limit_in_bytes"),
        "gpus": len(list((root / "proc/driver/nvidia/gpus").glob("*"))),
        "torch_cuda": _torch_cuda(),
        "ports": [int(word) for word in (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split()],
    }


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version(package: str) -> str | None:
    folder = _folder(package)
    if folder is None:
        return None
    if package == "rayvec":  # the metadata of an editable installation may be those of an older version
        found = re.search(r'^__version__ = "(.+)"', (folder / "__init__.py").read_text(), re.MULTILINE)
        return found[1] if found else "unknown"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _digest() -> str | None:
    """Returns a digest of the source of rayvec: nodes may have different code under the same version."""
    folder = _folder("rayvec")
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _torch_cuda() -> str | None:
    """Reads what torch was built for, without importing it."""
    folder = _folder("torch")
    with contextlib.suppress(OSError, TypeError):
        found = re.search(r"^cuda: .* = '(.+)'", (folder / "version.py").read_text(), re.MULTILINE)  # type: ignore[operator]
        return found[1] if found else None
    return None


def _groups(root: Path, controller: str) -> list[Path]:
    """Returns the directories of the control groups of this process and of those around them, in both versions."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            top = root / "sys/fs/cgroup" / (controller if names else "")
            inner = top / path.lstrip("/")
            found += [each for each in (inner, *inner.parents) if each == top or top in each.parents]
    return found


def _quota_cores(root: Path) -> float | None:
    quotas = []
    for folder in _groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota = (folder / "cpu.cfs_quota_us").read_text()
            if int(quota) > 0:
                quotas.append(int(quota) / int((folder / "cpu.cfs_period_us").read_text()))
    return min(quotas, default=None)


def _smallest(root: Path, controller: str, *names: str) -> int | None:
    values = []
    for folder in _groups(root, controller):
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                values.append(int((folder / name).read_text()))
    return min((value for value in values if value < 1 << 60), default=None)  # version 1 has a number for "none"


def _memory_free(root: Path) -> int:
    found = re.search(r"MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text())
    assert found is not None
    return 1024 * int(found[1])


def ping(connection: Any) -> tuple[float, float]:
    """Returns the median round trip in seconds and the bandwidth in bytes/s of a stream whose peer answers frames."""

    def exchange(frame: bytes) -> float:
        began = time.perf_counter()
        connection.send(frame)
        connection.recv()
        return time.perf_counter() - began

    small, large = (struct.pack("<Q", size) + bytes(size - 8) for size in (_SMALL, _LARGE))
    round_trip = statistics.median(exchange(small) for _ in range(_ROUNDS))
    took, sent = 0.0, 0
    while took < _TRANSFER_S:
        took += exchange(large) - round_trip
        sent += _LARGE
    return round_trip, sent / took


class NodeProbe:
    """Examines the node that it runs on; an actor."""

    def facts(self) -> dict[str, Any]:
        """See `read_facts`."""
        return read_facts()

    def listen(self, address: str, key: bytes) -> int:
        """Opens a listener that answers every frame, as a node of a run does; returns its port."""
        from rayvec.cluster.tcp_stream import Listener

        self._listener = Listener(address, key, _answer)
        return self._listener.port

    def connect(self, address: str, port: int, key: bytes) -> str:
        """Connects to a listener; returns what went wrong, or nothing."""
        from rayvec.cluster.tcp_stream import connect

        try:
            connect(address, port, key).close()
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def time_env(self, factory: bytes, seconds: float) -> dict[str, Any]:
        """Makes an environment and steps it with random actions.

        Returns:
            ``step_s``, the mean duration of a step; ``sigma``, the standard deviation of the durations' logarithm;
            ``make_s`` and ``obs_bytes``; or ``error`` alone.
        """
        try:
            began = time.perf_counter()
            made = pickle.loads(factory)
            env = made.make(0)
            observation, _ = env.reset(seed=0)
            make_s = time.perf_counter() - began
            env.action_space.seed(0)
            durations: list[float] = []
            while sum(durations) < seconds or len(durations) < 2:
                action = env.action_space.sample()
                began = time.perf_counter()
                _, _, terminated, truncated, _ = env.step(action)
                durations.append(time.perf_counter() - began)
                if terminated or truncated:
                    env.reset()
            env.close()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {
            "step_s": statistics.fmean(durations),
            "sigma": statistics.pstdev(map(math.log, durations)),
            "make_s": make_s,
            "obs_bytes": int(getattr(observation, "nbytes", 0)),
        }


def _answer(connection: Any) -> None:
    answer = struct.pack("<Q", _SMALL)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.recv()
            connection.send(answer)
