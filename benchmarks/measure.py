"""What every benchmark here measures with, beside :mod:`rayvec.bench`: headings, and clusters of simulated nodes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from peer_process import Measured, PeerProcess

from rayvec.bench.results import machine
from rayvec.bench.terminal import ratio, show_table, spread

_T = TypeVar("_T")


def check_only(only: Collection[str], peers: Collection[str]) -> None:
    """Ends the benchmark with a message where ``--only`` names peers that it does not have."""
    if unknown := set(only) - set(peers):
        raise SystemExit(f"--only names peers that are not here: {sorted(unknown)}. Expected some of {list(peers)}.")


def interleaved(ways: Mapping[str, Callable[[], _T]], repeats: int) -> dict[str, list[_T]]:
    """Measures each way once in every turn, so that other work on the machine disturbs all alike."""
    found: dict[str, list[_T]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, measure in ways.items():
            found[name].append(measure())
    return found


def measure_peers(
    peer: str,
    tasks: Mapping[str, Any],
    venvs: Mapping[str, Path],
    environment: Mapping[str, str],
    seconds: float,
    repeats: int,
) -> dict[str, list[Measured]]:
    """Returns windows of each peer, interleaved; those that are not installed are left out.

    Args:
        peer: ``module:function``; see :mod:`peer_process`.
        tasks: By name, what it is made with.
        venvs: Virtual environments of peers that do not run in this one.
        environment: Environment variables.
        seconds: Of a window at least.
        repeats: Windows of each.
    """
    with contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[], Measured]] = {}
        for name, task in tasks.items():  # one after another, so that none compiles while another is measured
            python = venvs[name] / "bin" / "python" if name in venvs else Path(sys.executable)
            if python.exists():
                process = stack.enter_context(PeerProcess(peer, task, str(python), environment=environment))
                if process.missing:
                    print(f"{name}: {process.missing}", file=sys.stderr)
                else:
                    process.measure(0.0)
                    ways[name] = partial(process.measure, seconds)
        return interleaved(ways, repeats)


def show_ms(title: str, names: Sequence[str], found: Mapping[str, list[Measured]]) -> None:
    """Prints a table of milliseconds of CPU time, and of their ratio to those of the first peer."""
    values = {name: [1e3 * each.cpu_s / each.count for each in windows] for name, windows in found.items()}
    rows = []
    for name in names:
        over = ratio(values[name], values[names[0]]) if {name, names[0]} <= set(values) else ""
        rows.append([name, spread(values[name], ".2f") if name in values else "not installed", over])
    show_table(title, ["", "ms", f"over {names[0]}"], rows)


def heading() -> str:
    """Returns the command, the machine and the versions that a table was measured with."""
    from rayvec.training.atomic_files import installed_versions  # not at the top: old checkouts lack it

    at = machine()
    found = ", ".join(f"{name} {number}" for name, number in installed_versions().items())
    command, load = shlex.join(sys.argv), os.getloadavg()[0]
    return f"`python {command}`, {date.today()}, {at['cores']} cores of {at['processor']}, load {load:.1f}, {found}"


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
