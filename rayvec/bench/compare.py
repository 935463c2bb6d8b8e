"""``rayvec bench compare``: steps/s and steps per CPU-second of rayvec and its peers in real environments."""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rayvec.bench.scaling import check_any
from rayvec.config.schema import Bounds, check, plain
from rayvec.errors import ConfigError, RayvecError

if TYPE_CHECKING:
    from rayvec.bench.results import Results
    from rayvec.bench.terminal import Ticker

__all__ = ["Compare"]

Count = Annotated[int, Bounds(1)]
OURS = ("rayvec-driver", "rayvec-worker")
_CHUNK_STEPS = 128
_MOST_RAY_ACTORS = 16
"""Environments that peers with one Ray actor for each are asked to have; more take minutes to start."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Measure steps/s and steps per CPU-second of rayvec and its peers, in real environments with random actions.

    Every peer is measured with each number of environments; its best row is marked. Then each is started once more with
    environments that write down when they step, to divide its time.
    """

    env_id: tuple[str, ...] = ("CartPole-v1",)
    """Gymnasium ids, such as CartPole-v1 HalfCheetah-v5 ale_py:ALE/Breakout-v5."""

    peer: tuple[str, ...] = (
        "floor",
        "gymnasium-sync",
        "gymnasium-async",
        "tianshou-subproc",
        "tianshou-shmem",
        "tianshou-ray",
        "stable-baselines3",
        "envpool",
        "pufferlib",
        "torchrl",
        "rllib",
    )
    """What is measured beside rayvec; floor are independent processes, one for each core."""

    peer_venv: tuple[str, ...] = ()
    """Virtual environments of peers, each name=path; those that RAYVEC_BENCH_VENVS names, separated by colons, too."""

    num_envs: tuple[Count, ...] = (8, 64)
    """Numbers of environments."""

    workers: Count | None = None
    """Processes or threads of those who can put several environments into one; unset: one for each core."""

    repeats: Count = 3
    """Windows of each row."""

    window: Annotated[float, Bounds(0, above=True)] = 1.0
    """Seconds of a window."""

    out: Path = Path("runs/bench-compare")
    """Directory for compare.json and compare.csv; what was there before is replaced."""

    def run(self, mentioned: frozenset[str] = frozenset()) -> None:
        """Measures, prints a table for each environment, and writes the files."""
        check(self)
        check_any(self, "env_id", "num_envs")
        from rayvec.bench.peers import COMPARE_PEERS, check_peers, venvs

        check_peers(self.peer, tuple(name for name in COMPARE_PEERS if name != "rayvec"))
        pythons = venvs(self.peer_venv)
        _check_envs(self.env_id)
        from rayvec.bench.results import Results
        from rayvec.bench.terminal import console, ticking

        results = Results("compare", plain(self) | {"out": str(self.out)}, self.out / "compare.json")
        terminal = console()
        cells = [(env_id, way, n) for env_id in self.env_id for way in (*OURS, *self.peer) for n in self._sizes(way)]
        try:
            with ticking(len(cells), terminal) as ticker:
                self._measure(cells, pythons, results, ticker)
        except KeyboardInterrupt:
            show(results, terminal)
            raise KeyboardInterrupt(f"interrupted; the finished rows are in {results.path}") from None
        show(results, terminal)

    def _sizes(self, way: str) -> list[int]:
        sizes = sorted(set(self.num_envs))
        return sorted({min(n, _MOST_RAY_ACTORS) for n in sizes}) if way == "tianshou-ray" else sizes

    def _measure(
        self, cells: list[tuple[str, str, int]], pythons: dict[str, str], results: Results, ticker: Ticker
    ) -> None:
        absent: dict[tuple[str, str], str] = {}
        for env_id, way, num_envs in cells:
            ticker.say(f"{env_id}, {way}, {num_envs} environments")
            if (env_id, way) not in absent:
                try:
                    row = self._row(env_id, way, num_envs, pythons)
                except RayvecError as error:
                    row = {"failed": str(error)}
                if "missing" in row:
                    absent[env_id, way] = row["missing"]
                results.add({"env_id": env_id, "way": way, "num_envs": num_envs, **row})
            ticker.advance(1.0)

    def _row(self, env_id: str, way: str, num_envs: int, pythons: dict[str, str]) -> dict[str, Any]:
        import sys

        peer, _, inference = way.partition("-") if way in OURS else (way, "", "driver")
        workers = min(self.workers or len(os.sched_getaffinity(0)), num_envs)
        task = {
            "num_envs": num_envs,
            "workers": workers,
            "workers_per_node": workers,
            "nodes": 1,
            "env_id": env_id,
            "inference": inference,
            "chunk_steps": _CHUNK_STEPS,
            "prefetch": way == "rayvec-worker",
        }
        row = self._measured(peer, task, pythons.get(peer, sys.executable))
        if "missing" not in row and "split" not in row:
            row |= self._divided(peer, task, pythons.get(peer, sys.executable), row["transport"])
        return row

    def _measured(self, peer: str, task: dict[str, Any], python: str) -> dict[str, Any]:
        """Returns how fast a peer is; of the floor also where the time goes, which it knows without being asked."""
        from rayvec.bench.peers import peer_process

        with ExitStack() as stack:
            process, started = stack.enter_context(peer_process(peer, _environment(), task, python))
            if "missing" in started:
                return {"missing": started["missing"]}
            floor = process if peer == "floor" else stack.enter_context(peer_process("floor", _environment(), task))[0]
            process.do("measure", seconds=min(0.3, self.window), with_split=False)
            windows: list[dict[str, Any]] = []
            floors: list[dict[str, Any]] = []
            for _ in range(self.repeats):  # in turns, since what a machine has to give changes by the minute
                for asked, found in ((process, windows), (floor, floors)):
                    found.append(asked.do("measure", seconds=self.window, with_split=False))
        rates = [window["steps_per_s"] for window in windows]
        of_floor = [rate / window["steps_per_s"] for rate, window in zip(rates, floors, strict=True)]
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
            **({"split": windows[0]["split"]} if peer == "floor" else {}),
        }

    def _divided(self, peer: str, task: dict[str, Any], python: str, transport: str) -> dict[str, Any]:
        """Returns where a peer's time goes, from another start with environments that write down when they step."""
        import tempfile

        from rayvec.bench.peers import peer_process

        with tempfile.TemporaryDirectory(prefix="rayvec-clocks-", ignore_cleanup_errors=True) as directory:
            try:
                clocked = task | {"clock_dir": directory}
                with peer_process(peer, _environment(), clocked, python) as (process, started):
                    if started.get("transport") != transport:
                        return {"undivided": f"it came up by {started.get('transport')} the second time"}
                    process.do("measure", seconds=min(0.3, self.window), with_split=False)
                    split = process.do("measure", seconds=min(0.5, self.window), with_split=True)["split"]
            except RayvecError as error:
                return {"undivided": str(error)}
        return {"split": split} if split else {"undivided": "its environments can't be asked"}


def _environment() -> dict[str, str]:
    """Returns what the processes of one peer have in their environment, with a mark of their own."""
    import uuid

    from rayvec.bench.harness.host import MARK

    return {MARK: uuid.uuid4().hex, "RAY_ADDRESS": "", "RAY_worker_niceness": "0"}


def _check_envs(env_ids: tuple[str, ...]) -> None:
    """Refuses ids that name no environment, before anything is measured.

    Raises:
        ConfigError: One of them.
    """
    from rayvec.envs.factory import EnvFactory

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


def show(results: Results, terminal: Any) -> None:
    """Prints a table for each environment, and writes the CSV."""
    from rayvec.bench.peers import NOT_INSTALLED
    from rayvec.bench.terminal import show_split, show_table

    if not results.rows:
        terminal.print("nothing was measured")
        return
    for env_id in dict.fromkeys(row["env_id"] for row in results.rows):
        rows = [row for row in results.rows if row["env_id"] == env_id]
        best = {
            way: max((row["steps_per_s"] for row in rows if row["way"] == way and "steps_per_s" in row), default=0.0)
            for way in {row["way"] for row in rows}
        }
        show_table(
            terminal,
            f"{env_id}, random actions; each peer's best row has a *",
            ("", "envs", "transport", "steps/s", "lowest to highest", "of\nfloor", "steps per\nCPU-second"),
            [_cells(row, best[row["way"]]) for row in rows],
        )
        divided = [((row["way"], row["num_envs"]), row["split"]) for row in rows if row.get("split")]
        if divided:
            title = f"{env_id}: where the time of the processes that step goes, percent"
            show_split(terminal, title, ("", "envs"), divided)
    for row in results.rows:
        if "undivided" in row:
            what = f"{row['way']}, {row['env_id']}, {row['num_envs']} environments"
            terminal.print(f"{what}: where its time goes is not known: {row['undivided']}")
        if "failed" in row:
            said = row["failed"].strip().splitlines()
            brief = said[0] if len(said) < 5 else f"{said[0][:120]} ... {said[-1]}"
            terminal.print(f"{row['way']}, {row['env_id']}, {row['num_envs']} environments: {brief}")
        if "missing" in row:
            terminal.print(f"{row['way']}, {row['env_id']}: {NOT_INSTALLED} ({row['missing']})")
    terminal.print(f"written: {results.path}, {results.write_csv()}")


def _cells(row: dict[str, Any], best: float) -> tuple[str, ...]:
    from rayvec.bench.peers import NOT_INSTALLED

    if "missing" in row:
        return row["way"], "", NOT_INSTALLED, "", "", "", ""
    if "failed" in row:
        return row["way"], str(row["num_envs"]), "failed, see below", "", "", "", ""
    rates = row["steps_per_s_all"]
    return (
        row["way"],
        str(row["num_envs"]),
        row["transport"],
        f"{row['steps_per_s']:,.0f}" + ("*" if row["steps_per_s"] == best else ""),
        f"{min(rates):,.0f} to {max(rates):,.0f}",
        f"{row['of_floor']:.2f}",
        f"{row['steps_per_cpu_s']:,.0f}",
    )
