"""What every benchmark here measures with, beside :mod:`rayvec.bench`: headings, and clusters of simulated nodes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rayvec.bench.measured_processes import PeerProcess, marked_environment, peer_process
from rayvec.bench.results import machine
from rayvec.bench.terminal import ratio, show_table, spread
from rayvec.errors import RayvecError
from rayvec.training.versions import installed_versions

_T = TypeVar("_T")


def share_modules() -> None:
    """Lets processes of the harness import the modules of this directory."""
    places = [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))


def run_command(run: Callable[[_T], None], settings: _T) -> None:
    """Runs a command of :mod:`rayvec.bench` with peers of this directory; wrong input ends it with a message."""
    share_modules()
    try:
        run(settings)
    except RayvecError as error:
        raise SystemExit(str(error)) from None


def check_only(only: Collection[str], peers: Collection[str]) -> None:
    """Ends the benchmark with a message where ``--only`` names peers that it does not have."""
    if unknown := set(only) - set(peers):
        raise SystemExit(f"--only names peers that are not here: {sorted(unknown)}. Expected some of {list(peers)}.")


def check_repeats(count: int, option: str = "--repeats") -> None:
    """Ends the benchmark with a message where it is to measure nothing."""
    if count < 1:
        raise SystemExit(f"{option} is at least 1, not {count}.")


def tree(root: int) -> list[int]:
    """Returns a process and all its descendants."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]


def interleaved(ways: Mapping[str, Callable[[], _T]], repeats: int) -> dict[str, list[_T]]:
    """Measures each way once in every turn, so that other work on the machine disturbs all alike."""
    check_repeats(repeats)
    found: dict[str, list[_T]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, measure in ways.items():
            found[name].append(measure())
    return found


def show_updates(
    adapter: str,
    tasks: Mapping[str, Any],
    venvs: Mapping[str, Path],
    settings: Mapping[str, str],
    measured: Callable[[PeerProcess], float],
    repeats: int,
    title: str,
    header: list[str],
    base: Callable[[str], str],
) -> None:
    """Lets peers make updates, each in a process of its own, and prints a table.

    Args:
        adapter: ``module:name`` of the harness's adapter that makes the updates of a peer.
        tasks: By peer, what the adapter is made with.
        venvs: Virtual environments of peers that do not run in this one.
        settings: Environment variables.
        measured: Returns a figure of some updates of a process.
        repeats: How often each is measured.
        title: Of the table.
        header: Its columns: peer, figure, figure over that of its base.
        base: Returns the base of a peer.
    """
    share_modules()
    ways: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:
        for name, task in tasks.items():  # one after another, so that none compiles while another is measured
            python = venvs[name] / "bin" / "python" if name in venvs else Path(sys.executable)
            if python.exists():
                environment = {**marked_environment(), **settings}
                start = peer_process(adapter, environment, task, str(python), "builtins:dict")
                process, started = stack.enter_context(start)
                if "missing" not in started:
                    measured(process)
                    ways[name] = partial(measured, process)
        found = interleaved(ways, repeats)
    rows = []
    for name in tasks:
        if name in found:
            over = ratio(found[name], found[base(name)]) if base(name) in found else ""
            rows.append([name, spread(found[name], ".2f"), over])
        else:
            rows.append([name, "not installed", ""])
    show_table(title, header, rows)


def heading() -> str:
    """Returns the command, the machine and the versions that a table was measured with."""
    at = machine()
    found = ", ".join(f"{name} {number}" for name, number in installed_versions().items())
    return f"`python {shlex.join(sys.argv)}`, {date.today()}, {at['cores']} cores of {at['processor']}, {found}"


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
