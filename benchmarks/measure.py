"""What every benchmark here measures with, beside :mod:`rayvec.bench`: headings, and clusters of simulated nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import psutil

from rayvec.bench.results import machine, versions


def share_modules() -> None:
    """Lets processes of the harness import the modules of this directory."""
    places = [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))


def tree(root: int) -> list[int]:
    """Returns a process and all its descendants."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]


def interleaved(ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measures each way once in every turn, so that other work on the machine disturbs all alike."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, measure in ways.items():
            found[name].append(measure())
    return found


def heading() -> str:
    """Returns the command, the machine and the versions that a table was measured with."""
    at = machine()
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"`python {' '.join(sys.argv)}`, {date.today()}, {at['cores']} cores of {at['processor']}, {found}"


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
