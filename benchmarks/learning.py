"""Learning through the command line, as a user runs it: wall time, greedy return and learning curve of several seeds.

    python benchmarks/learning.py
    python benchmarks/learning.py --algorithm sac --env-id Pendulum-v1 --plot pendulum.png -- --total-steps 20000

What follows ``--`` goes to ``rayvec train ALGORITHM``. Wall time is that of the whole process: the start of the
interpreter and of Ray, training, and the greedy evaluation. Returns are always the environment's own: what the
learner clips or scales does not show in them.

With ``--runs DIR`` the run directories are kept, and several calls can share them: ``DIR/seedN/outcome.json`` keeps the
outcome of each seed, seeds that have one are not trained again, and an interrupted seed resumes
from its last checkpoint. ``--report`` trains nothing and shows what has finished.

``--minutes 30`` ends each training after so much wall time, as Ctrl-C would; what it has learned by then is judged.
The learning rate falls over ``--total-steps``: choose as many as the time allows.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure
from measure import heading
from numpy.typing import NDArray

from rayvec.bench.terminal import show_table
from rayvec.training.atomic_files import written_whole
from rayvec.training.evaluation import evaluate_run
from rayvec.training.run_dir import load_result, load_run, read_metrics

RAYVEC = [sys.executable, "-m", "rayvec"]
INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """One run: its seed, directory, wall time in seconds, environment steps, and greedy returns."""

    seed: int
    run_dir: Path
    wall_s: float
    steps: int
    returns: NDArray[np.float64]


def run(command: Sequence[str], seed: int, episodes: int, minutes: float | None, directory: Path) -> Outcome:
    """Trains once in a process of its own, unless that was done before, and keeps what it came to."""
    run_dir = directory / f"seed{seed}"
    if not (run_dir / "outcome.json").exists():
        wall_s = train([*command, "--seed", str(seed), "--eval-episodes", str(episodes)], run_dir, minutes)
        steps, returns = judged(run_dir, episodes)
        keep(Outcome(seed, run_dir, wall_s, steps, returns))
    return read(run_dir)


def keep(outcome: Outcome) -> None:
    """Writes ``outcome.json`` into the directory of the run."""
    values = {"seed": outcome.seed, "wall_s": round(outcome.wall_s, 2), "steps": outcome.steps}
    with written_whole(outcome.run_dir / "outcome.json") as file:
        file.write((json.dumps({**values, "returns": outcome.returns.tolist()}) + "\n").encode())


def read(run_dir: Path) -> Outcome:
    """Returns what was kept of a run."""
    kept = json.loads((run_dir / "outcome.json").read_text())
    return Outcome(kept["seed"], run_dir, kept["wall_s"], kept["steps"], np.array(kept["returns"], np.float64))


def train(command: Sequence[str], run_dir: Path, minutes: float | None) -> float:
    """Trains in a process of its own, from the beginning or from the last checkpoint; returns the wall time in seconds.

    Whatever ends us ends the process too, with a checkpoint.
    """
    before_s = 0.0
    if (run_dir / "checkpoint.pt").exists():
        before_s = load_run(run_dir)[1]["progress"]["wall_s"]
        command = [*command[:2], "--resume", str(run_dir)]
    else:
        command = [*command, "--run-dir", str(run_dir)]
    limit_s = None if minutes is None else max(1.0, 60 * minutes - before_s)
    began_s, expected = time.monotonic(), 0
    with subprocess.Popen([*RAYVEC, *command], stdout=sys.stderr, start_new_session=True) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            code, expected = process.wait(), INTERRUPTED
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if code not in (0, expected):  # a run that something else ended resumes at the next call
        raise subprocess.CalledProcessError(code, command)
    return before_s + time.monotonic() - began_s


def judged(run_dir: Path, episodes: int) -> tuple[int, NDArray[np.float64]]:
    """Returns the steps that a run has taken and its greedy returns, played now if it was ended before it did so."""
    if (run_dir / "result.json").exists():
        result = load_result(run_dir)
        return result["total_steps"], np.array(result["eval_returns"], np.float64)
    steps = load_run(run_dir)[1]["progress"]["steps"]
    return steps, evaluate_run(run_dir, num_episodes=episodes).returns


def show(outcomes: dict[str, list[Outcome]]) -> None:
    """Prints the outcomes of each name that has runs, and below them what its seeds have in common."""
    rows, lines = [], []
    for name, runs in outcomes.items():
        for item in runs:
            returns = item.returns
            numbers = (f"{returns.mean():.1f}", f"{returns.std():.1f}", f"{returns.min():.0f}")
            rows.append((name, item.seed, f"{item.wall_s:.1f}", f"{item.steps:,}", *numbers))
        means = np.array([item.returns.mean() for item in runs])
        if len(means) > 1:
            error = means.std(ddof=1) / np.sqrt(len(means))
            drawn = np.random.default_rng(0).choice(means, (10_000, len(means)))  # bootstrap
            iqm_error = np.std([interquartile_mean(sample) for sample in drawn])
            lines.append(
                f"{name}: mean over seeds {means.mean():.1f}, standard error {error:.1f}, interquartile mean "
                f"{interquartile_mean(means):.1f}, its standard error {iqm_error:.1f}, lowest {means.min():.1f}."
            )
    header = ("", "seed", "wall time, s", "steps", "mean greedy return", "standard deviation", "lowest")
    show_table("Greedy episodes on seeds that were not trained on", header, rows)
    print(*lines, sep="\n")


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


def draw(outcomes: dict[str, list[Outcome]], path: Path, title: str) -> None:
    """Draws the curve of every seed and the mean, of each name that has runs."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (name, runs) in enumerate(outcomes.items()):
        if not runs:
            continue
        grid = np.linspace(0, max(item.steps for item in runs), 101)
        curves = np.array([curve(item.run_dir, grid) for item in runs])
        known = ~np.isnan(curves).any(0)
        axes.plot(grid, curves.T, color=f"C{number}", alpha=0.35, linewidth=1)
        label = f"{name}, mean of {len(runs)} seeds" if len(runs) > 1 else f"{name}, one seed"
        axes.plot(grid[known], curves[:, known].mean(0), color=f"C{number}", linewidth=2.5, label=label)
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
    minutes: float | None = None,
    report: bool = False,
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
        report: Train nothing, show what has finished in --runs.
        quick: One seed of 8,192 steps and 5 episodes: less than a minute.
        options: For ``rayvec train``.
    """
    if quick:
        seeds, episodes, options = seeds[:1], 5, ("--total-steps", "8192", *options)
    with tempfile.TemporaryDirectory() as directory:
        kept = runs or Path(directory)
        kept.mkdir(parents=True, exist_ok=True)
        wanted = [seed for seed in seeds if not report or (kept / f"seed{seed}" / "outcome.json").exists()]
        command = ["train", algorithm, "--env-id", env_id, *options]
        outcomes = [run(command, seed, episodes, minutes, kept) for seed in wanted]
        if not outcomes:
            sys.exit(f"none of the seeds {list(seeds)} has finished in {kept}")
        print(heading())
        shown = {"rayvec": outcomes}
        show(shown)
        if plot:
            draw(shown, plot, f"{env_id} · {algorithm.upper()}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    split = [*sys.argv, "--"].index("--")
    tyro.cli(partial(main, options=tuple(sys.argv[split + 1 :])), args=sys.argv[1:split], description=__doc__)
