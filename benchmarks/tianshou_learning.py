"""Tianshou's PPO and SAC, and IMPALA in its trainer, to thresholds through rayvec's environments, collector and ranks.

    python benchmarks/tianshou_learning.py [--tasks ppo-195 ppo-475 sac impala] [--learners 2] [--seeds 1]

Runs the examples as they are, on two simulated nodes, and prints a Markdown table. Fails if one ends below its
threshold.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from measure import heading, simulated_cluster

from rayvec.bench.terminal import show_table

EXAMPLES = Path(__file__).parents[1] / "examples"
TASKS: dict[str, tuple[str, float, Callable[[int, int], tuple[Any, ...]]]] = {
    "ppo-195": ("tianshou_ppo_cartpole.py", 195.0, lambda learners, _: (50_000, 195.0, learners)),
    "ppo-475": ("tianshou_ppo_cartpole.py", 475.0, lambda learners, _: (50_000, 475.0, learners)),
    "sac": ("tianshou_sac_pendulum.py", -250.0, lambda learners, _: (24_000, -250.0, learners)),
    "impala": ("tianshou_impala.py", 475.0, lambda learners, seed: (300_000, seed, 100, learners)),
}
"""Script, threshold of the mean return of ten episodes (IMPALA: of a hundred), and what its `main` is called with."""


def main(
    tasks: tuple[Literal["ppo-195", "ppo-475", "sac", "impala"], ...] = ("ppo-195", "ppo-475", "sac", "impala"),
    learners: int = 2,
    seeds: tuple[int, ...] = (1,),
) -> None:
    """Runs the tasks."""
    rows, missed = [], False
    with simulated_cluster(4, 4):
        for task in tasks:
            script, threshold, arguments = TASKS[task]
            for seed in seeds:
                np.random.seed(seed)
                torch.manual_seed(seed)
                began_s = time.monotonic()
                best = runpy.run_path(str(EXAMPLES / script))["main"](*arguments(learners, seed))
                rows.append((task, seed, learners, threshold, f"{best:.1f}", f"{time.monotonic() - began_s:.0f}"))
                missed = missed or best < threshold
    print(heading(("tianshou", "gymnasium", "ray", "torch")))
    show_table("Thresholds", ("task", "seed", "learners", "threshold", "mean return", "wall time, s"), rows)
    sys.exit(int(missed))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
