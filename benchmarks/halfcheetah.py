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
import signal
import subprocess
import sys
from pathlib import Path

import learning
from measure import heading

ENV_ID, EPISODES = "HalfCheetah-v5", 10
SETTINGS = (
    "--num-envs 1 --num-steps 4 --learning-starts 5000 --policy-lr 3e-4 --q-lr 1e-3 --policy-interval 2 "
    "--hidden-sizes 256 256"
).split()
OURS, THEIRS = "rayvec", "CleanRL-style"


def train(name: str, seed: int, options: argparse.Namespace) -> None:
    """Trains once in a process of its own, and keeps the outcome."""
    directory = options.runs / name.lower()
    directory.mkdir(parents=True, exist_ok=True)
    if name == OURS:
        args, _ = learning.parse(["--algorithm", "sac", "--env-id", ENV_ID, "--episodes", str(EPISODES)])
        learning.run(args, seed, [*SETTINGS, "--total-steps", str(options.steps), *options.settings], directory)
    else:
        script = Path(__file__).with_name("cleanrl_style.py")
        command = [sys.executable, script, ENV_ID, options.steps, seed, directory / f"seed{seed}"]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


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
    outcomes: dict[str, list[learning.Outcome]] = {OURS: [], THEIRS: []}
    for seed in options.seeds:
        for name, runs in outcomes.items():
            place = options.runs / name.lower() / f"seed{seed}"
            if not options.report and options.only in (None, name) and not (place / "outcome.json").exists():
                train(name, seed, options)
            if (place / "outcome.json").exists():
                runs.append(learning.read(place))
    print(heading(("gymnasium", "mujoco", "torch", "numpy")))
    learning.show(outcomes)
    if options.plot:
        learning.plot(outcomes, options.plot, f"{ENV_ID} · SAC")


if __name__ == "__main__":
    main()
