"""Does asynchronous collecting pay? IMPALA with 8 workers, of which one is 5 times slower.

python benchmarks/asynchronous.py

Environments sleep (2 ms a step, two of them to a worker), so workers share cores without disturbing each other.
Updates and steps are counted from ``metrics.jsonl``, without the first three iterations and the last one. Repeats are
interleaved.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tyro
from measure import interleaved
from stragglers import run as run_slowly, seconds

import rayvec
from rayvec.bench.terminal import show_table, spread

_NUM_ENVS = 16
WAYS: dict[str, dict[str, Any]] = {
    "8 equal workers, lockstep": {"factor": 1, "max_staleness": None},
    "one 5 x slower, lockstep": {"factor": 5, "max_staleness": None},
    "one 5 x slower, max_staleness=4": {"factor": 5, "max_staleness": 4},
    "one 5 x slower, max_staleness=16": {"factor": 5, "max_staleness": 16},
    "8 equal workers, max_staleness=16": {"factor": 1, "max_staleness": 16},
}


def run(factor: float, max_staleness: int | None, iterations: int) -> tuple[float, float, list[int]]:
    """Returns steps/s, updates/s, and how many columns had each staleness."""
    settings = {"num_envs": _NUM_ENVS, "num_steps": 16, "workers_per_node": 8, "max_staleness": max_staleness}
    lines = run_slowly(rayvec.IMPALAConfig, factor=factor, median_s=0.002, iterations=iterations, **settings)[:-1]
    elapsed_s = sum(map(seconds, lines[1:]))
    counts = np.zeros(max_staleness + 1 if max_staleness else 2, np.int64)
    for line in lines[1:]:
        found = line.get("staleness_counts") or [0, _NUM_ENVS]
        counts[: len(found)] += found
    return (lines[-1]["steps"] - lines[0]["steps"]) / elapsed_s, (len(lines) - 1) / elapsed_s, counts.tolist()


def main(repeats: int = 5, iterations: int = 40) -> None:
    """Prints steps/s and updates/s of each way, and the staleness of what was learned from.

    Args:
        repeats: How often each way is run.
        iterations: Updates of each run.
    """
    if iterations < 5:
        raise SystemExit(f"--iterations is at least 5, since the first ones are left out, not {iterations}")
    ways = {name: partial(run, **way, iterations=iterations) for name, way in WAYS.items()}
    rows = []
    for name, results in interleaved(ways, repeats).items():
        steps, updates, counts = zip(*results, strict=True)
        total = np.sum(counts, 0)
        staleness = f"{np.average(np.arange(len(total)), weights=total):.2f}"
        rows.append([name, spread(steps), spread(updates, ".1f"), staleness, int(np.flatnonzero(total).max())])
    show_table("IMPALA", ["", "steps/s", "updates/s", "mean staleness", "greatest staleness"], rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
