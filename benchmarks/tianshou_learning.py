"""Tianshou's PPO and SAC to their thresholds, through rayvec's environments, collector and learner ranks.

    python benchmarks/tianshou_learning.py [--tasks ppo-195 ppo-475 sac] [--learners 2] [--seeds 1]

Runs the examples as they are, on two simulated nodes, and prints a Markdown table. Fails if one ends below its
threshold.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from pathlib import Path

import numpy as np
import torch
from measure import heading, markdown, simulated_cluster

EXAMPLES = Path(__file__).parents[1] / "examples"
TASKS: dict[str, tuple[str, float, int]] = {
    "ppo-195": ("tianshou_ppo_cartpole.py", 195.0, 50_000),
    "ppo-475": ("tianshou_ppo_cartpole.py", 475.0, 50_000),
    "sac": ("tianshou_sac_pendulum.py", -250.0, 24_000),
}
"""Script, threshold of the mean return of ten episodes, and steps of an epoch."""


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    rows, missed = [], False
    with simulated_cluster(4, 4):
        for task in options.tasks:
            script, threshold, epoch_num_steps = TASKS[task]
            for seed in options.seeds:
                np.random.seed(seed)
                torch.manual_seed(seed)
                began_s = time.monotonic()
                best = runpy.run_path(str(EXAMPLES / script))["main"](epoch_num_steps, threshold, options.learners)
                rows.append(
                    (task, seed, options.learners, threshold, f"{best:.1f}", f"{time.monotonic() - began_s:.0f}")
                )
                missed = missed or best < threshold
    print(heading(("tianshou", "gymnasium", "ray", "torch")))
    print(markdown(("task", "seed", "learners", "threshold", "best mean return", "wall time, s"), rows))
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
