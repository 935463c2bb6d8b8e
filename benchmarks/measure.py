"""What every benchmark here measures with: process trees, machines, tables, simulated clusters."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from rayvec.bench.results import machine


def share_modules() -> None:
    """Lets processes of the harness import the modules of this directory."""
    places = [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))


def tree(root: int) -> list[int]:
    """Returns a process and all its descendants."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]


def spread(values: Sequence[float]) -> str:
    """Returns the median with the smallest and the largest value."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Returns the median of ratios, pair by pair, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(values, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def heading(packages: Sequence[str] = ("gymnasium", "ray", "numpy")) -> str:
    """Returns the command, the machine and the versions that a table was measured with."""
    at = machine()
    found = []
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return (
        f"`python {' '.join(sys.argv)}`, {date.today().isoformat()}, {os.cpu_count()} cores of "
        f"{at['processor']}, Python {at['python']}, {', '.join(found)}\n"
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
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has replaced it
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
