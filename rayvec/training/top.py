"""``rayvec top``: the nodes of a run in the terminal, while it trains."""

from __future__ import annotations

import contextlib
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayvec.errors import ConfigError, duration
from rayvec.training.status import NodeStatus, RunStatus, read_status

__all__ = ["top"]

_INTERVAL_S = 1.0
_LATE_S = 30.0
"""A node that returned nothing for so long is shown in red."""
_WIDTH = 120
"""Columns of a table that goes to a file."""
_NODE_WIDTH = 12
"""Columns for the name of a node, which is folded if it is longer."""
Read = Callable[[], list[RunStatus]]


def top(run_dir: Path | None, address: str | None, *, once: bool = False) -> int:
    """Shows runs until they end; returns the exit code: 1 if the process of a run has died.

    Args:
        run_dir: Directory of a run.
        address: Of a Ray cluster, all of whose runs are shown, in place of `run_dir`.
        once: Whether to print one table and end.

    Raises:
        ConfigError: Not exactly one of the two is given, there is no run, or the run has ended.
    """
    if (run_dir is None) == (address is None):
        raise ConfigError(
            "`rayvec top` shows a run, or all runs on a Ray cluster.",
            expected="RUN_DIR or --address",
            got="neither" if run_dir is None else "both",
            remedy="Pass the directory of a run, such as one below runs/, or --address auto.",
        )
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(_on_cluster(address)) if address is not None else _in_directory(run_dir)
        console, ages = Console(), _Ages()
        if not console.is_terminal:
            console.width = _WIDTH
        runs = read()
        _check_running(runs, address)
        if once:
            console.print(_view(runs, ages, console.width))
            return 0
        live = stack.enter_context(Live(_view(runs, ages, console.width), console=console, auto_refresh=False))
        while runs and not any(run.has_died or run.state != "running" for run in runs):
            time.sleep(_INTERVAL_S)
            runs = read() or ([] if address else runs)
            live.update(_view(runs, ages, console.width), refresh=True)
    if not console.is_terminal:
        console.line()  # which Live leaves out there
    died = any(run.has_died for run in runs)
    console.print("the process of the run has died" if died else "no run is left" if not runs else "the run has ended")
    return int(died)


def _in_directory(run_dir: Path | None) -> Read:
    assert run_dir is not None
    here = str(run_dir.absolute())  # the directory may have been moved or copied since the status was written
    return lambda: [replace(read_status(run_dir), run_dir=here)]


@contextlib.contextmanager
def _on_cluster(address: str) -> Iterator[Read]:
    from rayvec.cluster.ray_session import RaySession
    from rayvec.cluster.status_board import read_boards

    with RaySession(address):
        yield lambda: sorted(map(RunStatus.from_json, read_boards()), key=lambda run: run.run_dir)


def _check_running(runs: Sequence[RunStatus], address: str | None) -> None:
    if not runs:
        raise ConfigError(
            "`rayvec top --address` shows the runs that train on a Ray cluster.",
            expected="a run of `rayvec train` or rayvec.train that uses the cluster",
            got=f"none at {address}",
            remedy="Start one with the same --address, or pass the directory of a run.",
        )
    for run in runs:
        if run.state != "running" or run.has_died:
            run_dir = shlex.quote(str(run.run_dir))
            at_steps = f"at {run.steps:,} of {run.total_steps:,} steps"
            how = f"its process {run.pid} has died" if run.has_died else run.state
            resumes = "" if run.state == "finished" else f"; rayvec train ... --resume {run_dir} continues it"
            raise ConfigError(
                "`rayvec top` shows a run while it trains.",
                expected="a run that trains",
                got=f"{run.run_dir}: {how} {at_steps}",
                remedy=f"rayvec report {run_dir} shows what it did{resumes}.",
            )


class _Ages:
    """How long ago a status was written, without comparing the clocks of two hosts."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}

    def of(self, run: RunStatus) -> float:
        """Returns the seconds since this status was seen first, or, on the host that trains, written."""
        now_s, key = time.monotonic(), (run.run_dir, run.pid)
        number, since_s = self._seen.get(key, (-1, 0.0))
        if number != run.number:
            since_s = now_s
            if run.host == socket.gethostname():
                with contextlib.suppress(OSError):
                    written_s = (Path(run.run_dir) / "status.json").stat().st_mtime
                    since_s -= max(0.0, time.time() - written_s)
            self._seen[key] = run.number, since_s
        return now_s - since_s


def _view(runs: Sequence[RunStatus], ages: _Ages, width: int) -> RenderableType:
    return Group(*(part for run in runs for part in _run(run, ages.of(run), width)))


def _run(run: RunStatus, age_s: float, width: int) -> Iterator[RenderableType]:
    shown = "none yet" if run.return_mean is None else f"{run.return_mean:.1f}"
    restarts = ", ".join(f"{kind} {number}" for kind, number in run.restarts.items()) or "none"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in run.time_share.items()) or "nothing yet"
    yield Text(f"{run.title} · {run.state} · {run.run_dir}", style="bold", overflow="fold")
    yield Text(f"{run.steps:,}/{run.total_steps:,} steps · {run.steps_per_s:,.0f} steps/s · return {shown}")
    yield Text(f"time: {shares} · staleness {run.staleness} · restarts: {restarts}")
    yield _table(run.nodes, age_s, width) if run.nodes else Text("no iteration has ended yet")


def _table(nodes: Sequence[NodeStatus], age_s: float, width: int) -> Table:
    """Returns a row for each node. A narrow terminal gets fewer columns, so that no number is cut off."""
    seen_s = [node.seen_s + age_s for node in nodes]
    columns: dict[str, list[Any]] = {
        "envs": [f"{node.num_envs:,}" for node in nodes],
        "workers": [f"{node.num_workers:,}" for node in nodes],
        "steps/s": [f"{node.steps_per_s:,.0f}" for node in nodes],
        "step": ["-" if node.step_s is None else duration(node.step_s) for node in nodes],
        "efficiency": ["-" if node.efficiency is None else f"{node.efficiency:.0%}" for node in nodes],
        "restarts": [f"{node.n_restarts:,}" for node in nodes],
        "queue": [f"{node.n_pending:,}" for node in nodes],
        "last seen": [Text(f"{each:.0f} s ago", style="red" if each > _LATE_S else "") for each in seen_s],
    }
    widths = {name: 1 + max(map(len, [name, *cells])) for name, cells in columns.items()}
    while _NODE_WIDTH + sum(widths[name] for name in columns) > width and len(columns) > 1:
        del columns[list(columns)[-2]]  # "last seen" stays
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("node", min_width=_NODE_WIDTH, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for node, *cells in zip((node.node for node in nodes), *columns.values(), strict=True):
        table.add_row(node, *cells)
    return table
