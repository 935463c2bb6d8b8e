"""``rayvec bench compare``: steps/s and steps per CPU-second of rayvec and its peers in real environments."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from rayvec.bench.peers import (
    COMPARE_PEERS,
    NOT_INSTALLED,
    check_peers,
    marked_environment,
    peer_process,
    short_name,
    venvs,
)
from rayvec.bench.results import Results
from rayvec.bench.settings import Compare, check_any
from rayvec.bench.simulate import nodes
from rayvec.bench.terminal import console, show_split, show_table, ticking
from rayvec.config.schema import check
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, RayvecError

__all__ = ["run"]

OURS = ("rayvec-driver", "rayvec-worker")
_CHUNK_STEPS = 128


def run(settings: Compare, mentioned: frozenset[str] = frozenset()) -> None:
    """Measures, prints a table for each environment, and writes the files."""
    check(settings)
    check_any(settings, "env_id", "num_envs")
    check_peers(settings.peer, COMPARE_PEERS)
    pythons = venvs(settings.peer_venv)
    _check_envs(settings.env_id)
    results, terminal = Results.of("compare", settings), console()
    sizes = sorted(set(settings.num_envs))
    cells = [(env_id, way, n) for env_id in settings.env_id for way in (*OURS, *settings.peer) for n in sizes]
    absent = set()
    try:
        with ticking(len(cells), terminal) as ticker:
            for env_id, way, num_envs in cells:
                name = short_name(way)
                ticker.say(f"{env_id}, {name}, {num_envs} environments")
                if (env_id, way) not in absent:
                    row = _Row(settings, env_id, way, num_envs, pythons.get(name, sys.executable)).measured()
                    results.add({"env_id": env_id, "way": name, "num_envs": num_envs, **row})
                    absent |= {(env_id, way)} if "missing" in row else set()
                ticker.advance(1.0)
    except KeyboardInterrupt:
        _show(results, terminal, settings.reference)
        raise KeyboardInterrupt(f"interrupted; the finished rows are in {results.path}") from None
    _show(results, terminal, settings.reference)


class _Row:
    """One row of a table.

    Args:
        settings: Of the command.
        env_id: Of the environments.
        way: What steps them.
        num_envs: How many.
        python: The peer's interpreter.
    """

    def __init__(self, settings: Compare, env_id: str, way: str, num_envs: int, python: str) -> None:
        self._settings, self._way, self._python = settings, way, python
        self._peer = "rayvec" if way.startswith("rayvec-") else way
        workers = min(settings.workers or len(os.sched_getaffinity(0)), num_envs)
        self._task: dict[str, Any] = {
            "num_envs": num_envs,
            "workers": workers,
            "workers_per_node": workers,
            "nodes": 1,
            "env_id": env_id,
            "inference": "worker" if way == "rayvec-worker" else "driver",
            "chunk_steps": _CHUNK_STEPS,
            "prefetch": way == "rayvec-worker",
        }

    def measured(self) -> dict[str, Any]:
        """Returns how fast it is and where its time goes, or why that is not known."""
        with ExitStack() as stack:
            environment = marked_environment()
            try:
                if self._way == "rayvec-tcp":  # the driver's own node has no cores
                    cluster = stack.enter_context(nodes())
                    cluster.grow(1, self._task["workers"])
                    environment, self._task["address"] = cluster.environment, cluster.address
                row = self._rates(environment)
            except RayvecError as error:
                return {"failed": str(error)}
            return row if "missing" in row or "split" in row else row | self._divided(environment, row["transport"])

    def _rates(self, environment: dict[str, str]) -> dict[str, Any]:
        """Returns rates; of the floor also where the time goes, which it measures itself."""
        settings, task = self._settings, self._task
        with ExitStack() as stack:
            process, started = stack.enter_context(peer_process(self._peer, environment, task, self._python))
            if "missing" in started:
                return {"missing": started["missing"]}
            reference = process
            if self._way != settings.reference:
                reference, _ = stack.enter_context(peer_process(settings.reference, marked_environment(), task))
            process.do("measure", seconds=min(0.3, settings.window), with_split=False)
            windows: list[dict[str, Any]] = []
            references: list[dict[str, Any]] = []
            for _ in range(settings.repeats):  # interleaved, since the speed of a shared machine drifts
                for asked, found in ((process, windows), (reference, references)):
                    found.append(asked.do("measure", seconds=settings.window, with_split=False))
        rates = [window["steps_per_s"] for window in windows]
        of_floor = [rate / window["steps_per_s"] for rate, window in zip(rates, references, strict=True)]
        per_cpu = [window["steps"] / max(window["cpu_s"], 0.01) for window in windows]
        return {
            "num_envs": started["num_envs"],
            "workers": task["workers"],
            "transport": started["transport"],
            "steps_per_s": statistics.median(rates),
            "steps_per_s_all": rates,
            "of_floor": statistics.median(of_floor),
            "of_floor_all": of_floor,
            "steps_per_cpu_s": statistics.median(per_cpu),
            "steps_per_cpu_s_all": per_cpu,
            "start_s": started["start_s"],
            **({"split": windows[0]["split"]} if self._way == "floor" else {}),
        }

    def _divided(self, environment: dict[str, str], transport: str) -> dict[str, Any]:
        """Returns where the time goes, from another start with environments that record when they step."""
        with tempfile.TemporaryDirectory(prefix="rayvec-clocks-", ignore_cleanup_errors=True) as directory:
            try:
                task = self._task | {"clock_dir": directory}
                with peer_process(self._peer, environment, task, self._python) as (process, started):
                    if started.get("transport") != transport:
                        return {"undivided": f"it used {started.get('transport')} at its second start"}
                    process.do("measure", seconds=min(0.3, self._settings.window), with_split=False)
                    split = process.do("measure", seconds=min(0.5, self._settings.window), with_split=True)["split"]
            except RayvecError as error:
                return {"undivided": str(error)}
        return {"split": split} if split else {"undivided": "its environments record no times"}


def _check_envs(env_ids: tuple[str, ...]) -> None:
    """Refuses ids that name no environment, before anything is measured.

    Raises:
        ConfigError: One of them.
    """
    for env_id in env_ids:
        try:
            EnvFactory.build(env_id, 1).make(0).close()
        except RayvecError:
            raise
        except Exception as error:
            raise ConfigError(
                "--env-id names environments that can be made.",
                expected="a registered environment whose libraries are installed",
                got=f"{env_id} ({type(error).__name__}: {error})",
                remedy="Install what it needs, or leave it out.",
            ) from error


def _show(results: Results, terminal: Console, reference: str) -> None:
    """Prints a table for each environment, and writes the CSV."""
    if not results.rows:
        terminal.print("nothing was measured")
        return
    for env_id in dict.fromkeys(row["env_id"] for row in results.rows):
        rows = [row for row in results.rows if row["env_id"] == env_id]
        best: dict[str, float] = {}
        for row in rows:
            best[row["way"]] = max(best.get(row["way"], 0.0), row.get("steps_per_s", 0.0))
        show_table(
            terminal,
            f"{env_id}, random actions; each peer's best row has a *",
            ("", "envs", "transport", "steps/s", "lowest to highest", f"of\n{reference}", "steps per\nCPU-second"),
            [_texts(row, best[row["way"]]) for row in rows],
        )
        divided = [((row["way"], row["num_envs"]), row["split"]) for row in rows if row.get("split")]
        if divided:
            title = f"{env_id}: where the time of the processes that step goes, percent"
            show_split(terminal, title, ("", "envs"), divided)
    for row in results.rows:
        what = f"{row['way']}, {row['env_id']}, {row['num_envs']} environments"
        if "undivided" in row:
            terminal.print(f"{what}: where its time goes is not known: {row['undivided']}")
        if "failed" in row:
            said = row["failed"].strip().splitlines()
            terminal.print(f"{what}: {said[0] if len(said) < 5 else f'{said[0][:120]} ... {said[-1]}'}")
        if "missing" in row:
            terminal.print(f"{row['way']}, {row['env_id']}: {NOT_INSTALLED} ({row['missing']})")
    results.finish(terminal)


def _texts(row: dict[str, Any], best: float) -> tuple[str, ...]:
    if "missing" in row:
        return row["way"], "", NOT_INSTALLED, "", "", "", ""
    if "failed" in row:
        return row["way"], str(row["num_envs"]), "failed, see below", "", "", "", ""
    rates, shares = row["steps_per_s_all"], row["of_floor_all"]
    return (
        row["way"],
        str(row["num_envs"]),
        row["transport"],
        f"{row['steps_per_s']:,.0f}" + ("*" if row["steps_per_s"] == best else ""),
        f"{min(rates):,.0f} to {max(rates):,.0f}",
        f"{row['of_floor']:.2f} ({min(shares):.2f} to {max(shares):.2f})",
        f"{row['steps_per_cpu_s']:,.0f}",
    )
