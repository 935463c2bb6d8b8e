"""Learning through the command line, as a user runs it: wall time, greedy return and learning curve of several seeds.

    python benchmarks/learning.py
    python benchmarks/learning.py --algorithm sac --env-id Pendulum-v1 --plot pendulum.png -- --total-steps 20000

What follows ``--`` goes to ``rayvec train ALGORITHM``. Wall time is that of the whole process: the start of the
interpreter and of Ray, training, and the greedy evaluation. With ``--runs DIR`` the run directories are kept, and seeds
that have finished there are not trained again. ``--random 100`` plays as many episodes with random actions, for
comparison, in the environments of the first seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

RAYVEC = [sys.executable, "-c", "import sys; from rayvec.cli import main; sys.exit(main())"]
BLUE = "#4477aa"


@dataclass(frozen=True)
class Outcome:
    """One run: its seed, directory, wall time in seconds, environment steps, and greedy returns."""

    seed: int
    run_dir: Path
    wall_s: float
    steps: int
    returns: NDArray[np.float64]


def run(args: argparse.Namespace, seed: int, options: list[str], directory: Path) -> Outcome:
    """Trains once in a process of its own, unless that was done before."""
    run_dir = directory / f"seed{seed}"
    clock = run_dir / "process_s.txt"
    if not clock.exists():
        fixed = {"--env-id": args.env_id, "--seed": seed, "--eval-episodes": args.episodes, "--run-dir": run_dir}
        arguments = [str(part) for item in fixed.items() for part in item]
        began_s = time.monotonic()
        subprocess.run([*RAYVEC, "train", args.algorithm, *arguments, *options], check=True, stdout=sys.stderr)
        clock.write_text(f"{time.monotonic() - began_s:.2f}\n")
    result = json.loads((run_dir / "result.json").read_text())
    return Outcome(
        seed, run_dir, float(clock.read_text()), result["total_steps"], np.array(result["eval_returns"], np.float64)
    )


def table(outcomes: list[Outcome]) -> str:
    """Returns the outcomes as a Markdown table, and below it what the seeds have in common."""
    lines = [
        "| seed | wall time, s | steps | mean greedy return | standard deviation | lowest |",
        "|---|---|---|---|---|---|",
    ]
    for item in outcomes:
        returns = item.returns
        lines.append(
            f"| {item.seed} | {item.wall_s:.1f} | {item.steps:,} | {returns.mean():.1f} | {returns.std():.1f} "
            f"| {returns.min():.0f} |"
        )
    means = np.array([item.returns.mean() for item in outcomes])
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else float("nan")
    lines += ["", f"Mean over seeds {means.mean():.1f}, standard error {error:.1f}, "]
    lines[-1] += f"interquartile mean {interquartile_mean(means):.1f}, lowest {means.min():.1f}."
    return "\n".join(lines)


def interquartile_mean(values: NDArray[np.float64]) -> float:
    """Returns the mean without the lowest and the highest quarter, parts of values counted as such."""
    ordered, count = np.sort(values), len(values)
    edges = np.arange(count + 1).clip(count / 4, 3 * count / 4)
    return float((ordered * np.diff(edges)).sum() / (count / 2))


def curve(run_dir: Path, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the mean return of the episodes that ended around each point of `grid`, in steps; NaN without any."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [(line["steps"], line["return_mean"], line["episodes"]) for line in lines if line["episodes"]]
    steps, returns, episodes = np.array(points, np.float64).reshape(-1, 3).T
    near = np.abs(steps - grid[:, None]) <= grid[-1] / 40
    counts = near @ episodes
    return np.divide(near @ (returns * episodes), counts, out=np.full(len(grid), np.nan), where=counts > 0)


def plot(outcomes: list[Outcome], path: Path, title: str) -> None:
    """Draws the curve of every seed and their mean."""
    grid = np.linspace(0, outcomes[0].steps, 101)
    curves = np.array([curve(item.run_dir, grid) for item in outcomes])
    known = ~np.isnan(curves).any(0)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for k, each in enumerate(curves):
        axes.plot(
            grid, each, color=BLUE, alpha=0.35, linewidth=1, label=f"each of {len(curves)} seeds" if k == 0 else None
        )
    axes.plot(grid[known], curves[:, known].mean(0), color=BLUE, linewidth=2.5, label="mean")
    axes.set(title=title, xlabel="environment steps", ylabel="return of the exploring policy")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(frameon=False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def random_return(run_dir: Path, episodes: int) -> float:
    """Returns the mean return of actions drawn uniformly, in the environments of a run."""
    from rayvec.collector import Collector
    from rayvec.runs import load_run, make_env

    config, _ = load_run(run_dir)
    with make_env(config) as env:
        env.action_space.seed(0)
        collector = Collector(env, lambda obs: env.action_space.sample(), inference="driver", seed=config.eval_seed())
        return float(collector.collect(n_episode=episodes).stats.returns.mean())


def processor() -> str:
    """Returns the name of the processor, as far as the system tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns our own options, and those for ``rayvec train``."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="ppo")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--episodes", type=int, default=100, help="of the greedy evaluation")
    parser.add_argument("--plot", type=Path, help="PNG to draw the learning curves into")
    parser.add_argument("--runs", type=Path, help="directory to keep the runs in")
    parser.add_argument("--random", type=int, default=0, help="episodes to play with random actions")
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


def main() -> None:
    """Runs all seeds one after another, prints the table and draws the curves."""
    args, options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        runs = args.runs or Path(directory)
        runs.mkdir(parents=True, exist_ok=True)
        outcomes = [run(args, seed, options, runs) for seed in args.seeds]
        print(f"`python {' '.join(sys.argv)}` on {os.cpu_count()} cores of {processor()}\n")
        print(table(outcomes))
        if args.plot:
            plot(outcomes, args.plot, f"{args.env_id} · {args.algorithm.upper()} · {len(outcomes)} seeds")
        if args.random:
            print(
                f"\nRandom actions: {random_return(outcomes[0].run_dir, args.random):.1f} over {args.random} episodes."
            )


if __name__ == "__main__":
    main()
