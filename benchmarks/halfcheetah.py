"""SAC on HalfCheetah-v5 for 100,000 steps: ours beside a script in the way of CleanRL, seed by seed.

    python benchmarks/halfcheetah.py --runs runs/halfcheetah --plot benchmarks/halfcheetah.png
    python benchmarks/halfcheetah.py --runs runs/halfcheetah --seeds 1 2 -- --compile

Both have the settings of CleanRL's script: one environment, an update for each step after 5,000 random ones, two
hidden layers of 256 units, delayed policy updates. Ours publishes its weights every four steps (``--num-steps 4``), the
script acts with each update's. What follows ``--`` goes to ``rayvec train sac`` too. Each run has a process of its own,
one after another; at the end 10 greedy episodes are played.

``outcome.json`` in the directory of each run keeps its outcome, and a finished run is not repeated: stop with Ctrl-C,
and continue with the same command. An interrupted run of rayvec resumes from its checkpoint; the script starts again.
``--report`` trains nothing and shows what has finished.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import learning
import numpy as np
from learning import Outcome, interquartile_mean
from measure import heading, markdown
from numpy.typing import NDArray

ENV_ID, EPISODES = "HalfCheetah-v5", 10
SETTINGS = (
    "--num-envs 1 --num-steps 4 --learning-starts 5000 --policy-lr 3e-4 --q-lr 1e-3 --policy-interval 2 "
    "--hidden-sizes 256 256"
).split()
OURS, THEIRS = "rayvec", "CleanRL-style"


def ours(seed: int, options: argparse.Namespace, directory: Path) -> None:
    """Trains with ``rayvec train sac``."""
    args, _ = learning.parse(["--algorithm", "sac", "--env-id", ENV_ID, "--episodes", str(EPISODES)])
    learning.run(args, seed, [*SETTINGS, "--total-steps", str(options.steps), *options.settings], directory)


def theirs(seed: int, options: argparse.Namespace, directory: Path) -> None:
    """Trains with the script."""
    script = Path(__file__).with_name("cleanrl_style.py")
    command = [sys.executable, script, ENV_ID, options.steps, seed, directory / f"seed{seed}"]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def finished(directory: Path, seeds: list[int]) -> list[Outcome]:
    """Returns what has been kept of these seeds."""
    places = [directory / f"seed{seed}" for seed in seeds]
    return [learning.read(place) for place in places if (place / "outcome.json").exists()]


def error_of_iqm(values: NDArray[np.float64]) -> float:
    """Returns the standard error of the interquartile mean, by 10,000 bootstrap samples of the seeds."""
    if len(values) < 2:
        return float("nan")
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    return float(np.std([interquartile_mean(sample) for sample in drawn]))


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Returns the returns of all seeds, and below them how far apart the two are."""
    rows, summary = [], {}
    for name, runs in outcomes.items():
        for item in runs:
            rows.append(
                [name, item.seed, f"{item.wall_s:.0f}", f"{item.returns.mean():.0f}", f"{item.returns.std():.0f}"]
            )
        means = np.array([item.returns.mean() for item in runs])
        if len(means):
            summary[name] = interquartile_mean(means), error_of_iqm(means)
    lines = [markdown(["", "seed", "wall time, s", f"greedy return, {EPISODES} episodes", "over episodes"], rows), ""]
    lines += [
        f"{name}: interquartile mean {mean:.0f}, standard error {error:.0f} ({len(outcomes[name])} seeds)."
        for name, (mean, error) in summary.items()
    ]
    if len(summary) == 2:
        (mine, error), (other, other_error) = summary[OURS], summary[THEIRS]
        lines.append(
            f"{OURS} minus {THEIRS}: {mine - other:+.0f}, which is {(mine - other) / other_error:+.1f} standard errors "
            f"of the latter, {(mine - other) / np.hypot(error, other_error):+.1f} of the difference."
        )
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options, those for ``rayvec train sac`` as ``settings``."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="directory to keep the runs in")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--only", choices=[OURS, THEIRS])
    parser.add_argument("--plot", type=Path, help="PNG to draw the learning curves into")
    parser.add_argument("--report", action="store_true", help="train nothing, show what has finished")
    options = parser.parse_args(arguments[:split])
    options.settings = arguments[split + 1 :]
    return options


def main() -> None:
    """Runs what is missing, alternating between the two, and prints the table."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parse(sys.argv[1:])
    kinds = {OURS: ours, THEIRS: theirs}
    directories = {name: options.runs / name.lower() for name in kinds}
    for seed in options.seeds:
        for name, run in kinds.items():
            wanted = not options.report and options.only in (None, name)
            if wanted and not finished(directories[name], [seed]):
                os.makedirs(directories[name], exist_ok=True)
                run(seed, options, directories[name])
    outcomes = {name: finished(directory, options.seeds) for name, directory in directories.items()}
    print(heading(("gymnasium", "mujoco", "torch", "numpy")))
    print(table(outcomes))
    if options.plot:
        learning.plot(outcomes, options.plot, f"{ENV_ID} · SAC")


if __name__ == "__main__":
    main()
