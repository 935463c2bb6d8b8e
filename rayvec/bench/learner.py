"""``rayvec bench learner``: samples/s of updates over ranks, beside threads and plain DDP."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rayvec.bench.scaling import check_any
from rayvec.config.schema import Bounds, check, plain
from rayvec.errors import RayvecError

if TYPE_CHECKING:
    from rayvec.bench.results import Results

__all__ = ["LearnerBench"]

Count = Annotated[int, Bounds(1)]


@dataclass(frozen=True, kw_only=True)
class LearnerBench:
    """Measure samples/s of updates over ranks, beside as many threads of one process, and plain DDP.

    A sample is a row of a minibatch; efficiency is samples/s over those of one rank times the number of ranks.
    """

    num_learners: tuple[Count, ...] = (1, 2, 4)
    """Numbers of ranks, or of threads."""

    scaling: Literal["strong", "weak"] = "strong"
    """Whether the batch stays as large as it is, or grows with the number of ranks."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where updates are computed; with cuda each rank has a GPU of its own."""

    algorithm: tuple[Literal["ppo", "sac", "impala"], ...] = ("ppo", "sac", "impala")
    """Whose updates."""

    way: tuple[Literal["ranks", "threads", "ddp"], ...] = ("ranks", "threads", "ddp")
    """How: rayvec's ranks, threads of one process, DistributedDataParallel as one writes it by hand."""

    minibatch_size: Count = 1024
    """Rows of a minibatch, of one rank where the scaling is weak."""

    num_envs: Count = 64
    """Columns of the batch, of one rank where the scaling is weak; PPO and IMPALA have 64 steps of each."""

    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Units in each hidden layer."""

    obs_size: Count = 17
    """Numbers in an observation."""

    window: Annotated[float, Bounds(0, above=True)] = 2.0
    """Seconds of each row at least; two updates at least."""

    address: str | None = None
    """Of a running Ray cluster; unset: ranks on this machine."""

    out: Path = Path("runs/bench-learner")
    """Directory for learner.json and learner.csv; what was there before is replaced."""

    def run(self, mentioned: frozenset[str] = frozenset()) -> None:
        """Measures, prints the table, and writes the files."""
        check(self)
        check_any(self, "num_learners", "algorithm", "way", "hidden_sizes")
        if self.address is not None:
            from rayvec.bench.simulate import reachable

            reachable(self.address)
        if self.device == "cuda":
            from rayvec.learners.base import torch_device

            torch_device("cuda")
        from rayvec.bench.results import Results
        from rayvec.bench.terminal import console, ticking

        results = Results("learner", plain(self) | {"out": str(self.out)}, self.out / "learner.json")
        terminal = console()
        cells = [
            (algorithm, way, count)
            for algorithm in self.algorithm
            for way in self.way
            for count in sorted(set(self.num_learners))
        ]
        try:
            with ticking(len(cells), terminal) as ticker:
                for algorithm, way, count in cells:
                    ticker.say(f"{algorithm}, {way}, {count}")
                    results.add(self._measure(algorithm, way, count))
                    ticker.advance(1.0)
        except KeyboardInterrupt:
            show(results, terminal)
            raise KeyboardInterrupt(f"interrupted; the finished rows are in {results.path}") from None
        show(results, terminal)

    def _measure(self, algorithm: str, way: str, count: int) -> dict[str, Any]:
        import os
        import uuid

        from rayvec.bench.harness.host import MARK
        from rayvec.bench.peers import PeerProcess

        task = {
            "algorithm": algorithm,
            "num_learners": count,
            "num_envs": self.num_envs,
            "minibatch_size": self.minibatch_size,
            "weak": self.scaling == "weak",
            "hidden_sizes": list(self.hidden_sizes),
            "obs_size": self.obs_size,
            "device": self.device,
            "address": self.address,
        }
        row: dict[str, Any] = {"algorithm": algorithm, "way": way, "num_learners": count, "scaling": self.scaling}
        process = PeerProcess(f"{algorithm} by {way}", {MARK: uuid.uuid4().hex})
        try:
            started = process.do("start_learner", way=way, task=task)
            if "missing" in started:
                return row | {"failed": f"not installed: {started['missing']}"}
            found = process.do("update", seconds=self.window)
        except RayvecError as error:
            return row | {"failed": str(error)}
        except BaseException:
            process.kill()
            raise
        finally:
            process.close()
        times = found["times_s"]
        return row | {
            "samples_per_s": found["samples"] / sum(times),
            "update_ms": 1e3 * statistics.median(times),
            "update_ms_all": [1e3 * each for each in times],
            "start_s": started["start_s"],
            "cores": len(os.sched_getaffinity(0)),
        }


def show(results: Results, terminal: Any) -> None:
    """Prints the table, and writes the CSV."""
    from rayvec.bench.terminal import show_table

    if not results.rows:
        terminal.print("nothing was measured")
        return
    one = {
        (row["algorithm"], row["way"]): row["samples_per_s"]
        for row in results.rows
        if row["num_learners"] == 1 and "samples_per_s" in row
    }
    lines = []
    for row in results.rows:
        single = one.get((row["algorithm"], row["way"]))
        if "failed" in row:
            lines.append((row["algorithm"], row["way"], str(row["num_learners"]), "failed, see below", "", "", "", ""))
            continue
        speedup = row["samples_per_s"] / single if single else None
        row["efficiency"] = speedup / row["num_learners"] if speedup else None
        lines.append(
            (
                *(row["algorithm"], row["way"], str(row["num_learners"]), f"{row['samples_per_s']:,.0f}"),
                *(f"{row['update_ms']:.1f}", f"{min(row['update_ms_all']):.1f} to {max(row['update_ms_all']):.1f}"),
                f"{speedup:.2f}" if speedup else "",
                f"{100 * row['efficiency']:.0f}%" if speedup else "",
            )
        )
    header = (
        "algorithm",
        "by",
        "ranks or threads",
        "samples/s",
        "update, ms",
        "lowest to highest",
        "times one",
        "efficiency",
    )
    show_table(terminal, f"{results.rows[0]['scaling']} scaling", header, lines)
    cores = max((row.get("cores", 0) for row in results.rows), default=0)
    if cores and max(row["num_learners"] for row in results.rows) > cores:
        terminal.print(f"More ranks than this machine has cores ({cores}) share them: no gain can be expected there.")
    for row in results.rows:
        if "failed" in row:
            terminal.print(f"{row['algorithm']} by {row['way']}, {row['num_learners']}: {row['failed']}")
    results.write()
    terminal.print(f"written: {results.path}, {results.write_csv()}")
