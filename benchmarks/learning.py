"""What several seeds learn, as ``rayvec train`` trains them: wall time, greedy return and learning curves.

    python benchmarks/learning.py
    python benchmarks/learning.py --algorithm sac --env-id Pendulum-v1 --plot pendulum.png -- --total-steps 20000

What follows ``--`` are options of ``rayvec train ALGORITHM``. Wall time includes the start of the environments and the
greedy evaluation. Returns are always the environment's own: what the learner clips or scales does not show in them.

With ``--runs DIR`` the run directories are kept: a later call trains no finished seed again, and resumes an interrupted
one. ``--minutes 30`` ends each training after so much wall time; what it has learned by then is evaluated. The learning
rate falls over ``--total-steps``: choose as many as the time allows.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure
from measure import heading
from numpy.typing import NDArray

import rayvec
from rayvec.bench.terminal import show_table
from rayvec.config import CONFIGS
from rayvec.config.command_line import read_options
from rayvec.training.run_dir import load_result, read_metrics


@dataclass
class StopAfter:
    """Ends a training after so many minutes, those before a resume included."""

    minutes: float

    def on_iteration(self, context: rayvec.RunContext) -> None:
        """Looks at the clock."""
        if context.progress.wall_s > 60 * self.minutes:
            context.stop(f"{self.minutes:g} minutes are over")


def run(algorithm: str, settings: Mapping[str, Any], run_dir: Path, minutes: float) -> dict[str, Any]:
    """Trains, unless that was done before, and returns what ``result.json`` says."""
    if not (run_dir / "result.json").exists():
        if run_dir.exists():
            rayvec.resume(run_dir, callbacks=[StopAfter(minutes)])
        else:
            rayvec.train(CONFIGS[algorithm](run_dir=run_dir, **settings), callbacks=[StopAfter(minutes)])
    return load_result(run_dir)


def show(results: list[dict[str, Any]]) -> None:
    """Prints a row for each seed, and below them what the seeds have in common."""
    rows = []
    for result in results:
        returns = np.array(result["eval_returns"])
        numbers = (f"{returns.mean():.1f}", f"{returns.std():.1f}", f"{returns.min():.0f}")
        rows.append((result["seed"], f"{result['wall_s']:.1f}", f"{result['total_steps']:,}", *numbers))
    header = ("seed", "wall time, s", "steps", "mean greedy return", "standard deviation", "lowest")
    show_table("Greedy episodes on seeds that were not trained on", header, rows)
    means = np.array([np.mean(result["eval_returns"]) for result in results])
    if len(means) > 1:
        error = means.std(ddof=1) / np.sqrt(len(means))
        print(
            f"Mean over seeds {means.mean():.1f}, standard error {error:.1f}, interquartile mean "
            f"{interquartile_mean(means):.1f}, lowest {means.min():.1f}."
        )


def interquartile_mean(values: NDArray[np.float64]) -> float:
    """Returns the mean without the lowest and the highest quarter, parts of values counted as such."""
    ordered, count = np.sort(values), len(values)
    edges = np.arange(count + 1).clip(count / 4, 3 * count / 4)
    return float((ordered * np.diff(edges)).sum() / (count / 2))


def curve(run_dir: Path, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the mean return of the episodes that ended around each point of `grid`, in steps; NaN without any."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    points = [(line["steps"], line["return_sum"], line["episodes"]) for line in lines if line["episodes"]]
    steps, sums, episodes = np.array(points, np.float64).reshape(-1, 3).T
    near = np.abs(steps - grid[:, None]) <= grid[-1] / 40
    counts = near @ episodes
    return np.divide(near @ sums, counts, out=np.full(len(grid), np.nan), where=counts > 0)


def draw(run_dirs: list[Path], steps: int, path: Path, title: str) -> None:
    """Draws the curve of every seed and their mean."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    grid = np.linspace(0, steps, 101)
    curves = np.array([curve(run_dir, grid) for run_dir in run_dirs])
    known = ~np.isnan(curves).any(0)
    axes.plot(grid, curves.T, color="C0", alpha=0.35, linewidth=1)
    label = f"mean of {len(curves)} seeds" if len(curves) > 1 else "one seed"
    axes.plot(grid[known], curves[:, known].mean(0), color="C0", linewidth=2.5, label=label)
    axes.set(title=title, xlabel="environment steps", ylabel="return of the exploring policy")
    axes.legend(frameon=False)
    figure.savefig(path)


def main(
    algorithm: str = "ppo",
    env_id: str = "CartPole-v1",
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    episodes: int = 100,
    plot: Path | None = None,
    runs: Path | None = None,
    minutes: float = float("inf"),
    quick: bool = False,
    *,
    options: tyro.conf.Suppress[tuple[str, ...]] = (),
) -> None:
    """Runs all seeds one after another, prints the table and draws the curves.

    Args:
        algorithm: Which learner.
        env_id: Environment.
        seeds: Of the runs.
        episodes: Of the greedy evaluation.
        plot: PNG to draw the learning curves into.
        runs: Directory to keep the runs in.
        minutes: Wall time after which each training ends.
        quick: One seed of 8,192 steps and 5 episodes: less than a minute.
        options: For ``rayvec train``.
    """
    if quick:
        seeds, episodes, options = seeds[:1], 5, ("--total-steps", "8192", *options)
    settings = read_options(f"train {algorithm}", CONFIGS[algorithm], options)
    settings |= {"env_id": env_id, "eval_episodes": episodes}
    with tempfile.TemporaryDirectory() as directory:
        run_dirs = {seed: (runs or Path(directory)) / f"seed{seed}" for seed in seeds}
        results = [run(algorithm, {**settings, "seed": seed}, path, minutes) for seed, path in run_dirs.items()]
        print(heading())
        show(results)
        if plot:
            steps = max(result["total_steps"] for result in results)
            draw(list(run_dirs.values()), steps, plot, f"{env_id} · {algorithm.upper()}")


if __name__ == "__main__":
    split = [*sys.argv, "--"].index("--")
    tyro.cli(partial(main, options=tuple(sys.argv[split + 1 :])), args=sys.argv[1:split], description=__doc__)
