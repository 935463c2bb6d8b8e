"""Train a grid of settings, each with several seeds, and plot the curves with mean and spread.

python examples/sweep.py

Finished runs are not trained again, so that an interrupted sweep can be started a second time. Runs follow one after
another, each with all cores; `rayvec plot runs/sweep/*` draws the same picture later.
"""

import itertools
from pathlib import Path

import tyro

import rayvec
from rayvec.training.plots import plot_runs, read_runs

GRID = {"learning_rate": [2.5e-3, 5e-4], "gamma": [0.98, 0.99]}


def main(total_steps: int = 50_000, num_seeds: int = 3) -> None:
    """Trains what is missing, prints a line for each setting, and draws ``sweep.png``."""
    run_dirs = []
    for values in itertools.product(*GRID.values()):
        settings = dict(zip(GRID, values, strict=True))
        for seed in range(1, num_seeds + 1):
            name = "-".join(f"{key}{value:g}" for key, value in settings.items())
            run_dir = Path("runs/sweep") / f"{name}-seed{seed}"
            if (run_dir / "result.json").exists():
                print(f"{run_dir} is finished")
            elif run_dir.exists():
                rayvec.resume(run_dir)
            else:
                config = rayvec.PPOConfig(
                    env_id="CartPole-v1", total_steps=total_steps, seed=seed, run_dir=run_dir, **settings
                )
                rayvec.train(config)
            run_dirs.append(run_dir)
    groups = read_runs(run_dirs)
    plot_runs(groups, Path("sweep.png"))
    print(*groups, "the curves are in sweep.png", sep="\n")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
