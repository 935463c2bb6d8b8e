"""What every benchmark here measures with: CPU time of process trees, machines, tables, simulated clusters."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Sequence[int]) -> float:
    """Returns the CPU time that these processes have used so far, in seconds."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def tree(root: int) -> list[int]:
    """Returns a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def spread(values: Sequence[float]) -> str:
    """Returns the median with the smallest and the largest value."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Returns the median of ratios, pair by pair, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(values, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def heading(packages: Sequence[str] = ("gymnasium", "ray", "numpy")) -> str:
    """Returns the command, the machine and the versions that a table was measured with."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    found = []
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return (
        f"`python {' '.join(sys.argv)}`, {date.today().isoformat()}, {os.cpu_count()} cores of "
        f"{models[0] if models else platform.machine()}, Python {platform.python_version()}, {', '.join(found)}\n"
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


@contextlib.contextmanager
def simulated_cluster(*cpus: int) -> Iterator[Any]:
    """A private Ray with one simulated node for each number of cores; the driver runs on the first. Yields its Cluster.

    SIGTERM ends the benchmark as Ctrl-C does, so that nothing of the cluster is left behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("RAY_AUTH_TOKEN", os.urandom(32).hex())
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory(prefix="rvb-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_TMPDIR"] = directory
        os.mkdir(f"{directory}/ray")
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
        try:
            for count in cpus[1:]:
                cluster.add_node(num_cpus=count)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=40)
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has put its own in the place
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
