"""Time of one sum over two processes, by shared memory and by gloo. Needs no Ray.

    python benchmarks/rank_sums.py --sizes 1000 70000

Whole updates on ranks are what ``rayvec bench learner`` measures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import tyro
from measure import heading, markdown
from rayvec.bench.harness.rank_processes import RankProcesses

from rayvec.learners.ranks import Ranks


def timed_sums(ranks: Ranks) -> Callable[[int], float]:
    """Returns what a rank does for a size: it sums often, and answers with the median in seconds."""

    def sum_often(size: int) -> float:
        tensor, times_s = torch.zeros(size), []
        for _ in range(max(20, min(1000, 10_000_000 // size))):
            begin_s = time.perf_counter()
            ranks.sum_(tensor)
            times_s.append(time.perf_counter() - begin_s)
        return statistics.median(times_s)

    return sum_often


def main(sizes: tuple[int, ...] = (1_000, 10_000, 70_000, 300_000, 1_700_000), repeats: int = 7) -> None:
    """Prints the microseconds of a sum of so many float32, interleaving the two ways."""
    pairs = {way: RankProcesses(2, way, timed_sums) for way in ("shared-memory", "gloo")}
    rows = []
    for size in sizes:
        measured = [[max(pair.ask(size)) * 1e6 for pair in pairs.values()] for _ in range(repeats)]
        columns = zip(*measured, strict=True)
        rows.append([f"{size:,}", *(f"{statistics.median(c):.0f} ({min(c):.0f} to {max(c):.0f})" for c in columns)])
    for pair in pairs.values():
        pair.close()
    print(heading(("torch", "numpy")))
    print(markdown(["floats", *(f"{way}, us" for way in pairs)], rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
