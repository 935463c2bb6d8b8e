"""Learning through the command line, as a user runs it: wall time and greedy return for several seeds.

    python benchmarks/learning.py --env-id CartPole-v1 --seeds 1 2 3 4 5 -- --total-steps 100000

What follows ``--`` goes to ``rayvec train ppo``. Wall time is that of the whole process: the start of the
interpreter and of Ray, training, and the greedy evaluation.
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

RAYVEC = [sys.executable, "-c", "import sys; from rayvec.cli import main; sys.exit(main())"]


@dataclass(frozen=True)
class Outcome:
    """One run: its seed, wall time in seconds, environment steps, and greedy returns."""

    seed: int
    wall_s: float
    steps: int
    returns: list[float]


def run(env_id: str, seed: int, episodes: int, options: list[str], directory: Path) -> Outcome:
    """Trains once in a process of its own."""
    run_dir = directory / f"seed{seed}"
    fixed = {"--env-id": env_id, "--seed": seed, "--eval-episodes": episodes, "--run-dir": run_dir}
    arguments = [str(part) for item in fixed.items() for part in item]
    began_s = time.monotonic()
    subprocess.run([*RAYVEC, "train", "ppo", *arguments, *options], check=True, stdout=sys.stderr)
    wall_s = time.monotonic() - began_s
    result = json.loads((run_dir / "result.json").read_text())
    return Outcome(seed, wall_s, result["total_steps"], result["eval_returns"])


def table(outcomes: list[Outcome]) -> str:
    """Returns the outcomes as a Markdown table."""
    lines = ["| seed | wall time, s | steps | mean greedy return | lowest |", "|---|---|---|---|---|"]
    for item in outcomes:
        mean = sum(item.returns) / len(item.returns)
        lines.append(f"| {item.seed} | {item.wall_s:.1f} | {item.steps:,} | {mean:.1f} | {min(item.returns):.0f} |")
    return "\n".join(lines)


def processor() -> str:
    """Returns the name of the processor, as far as the system tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Runs all seeds one after another and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--episodes", type=int, default=100)
    ours = sys.argv[1:]
    theirs: list[str] = []
    if "--" in ours:
        split = ours.index("--")
        ours, theirs = ours[:split], ours[split + 1 :]
    args = parser.parse_args(ours)
    with tempfile.TemporaryDirectory() as directory:
        outcomes = [run(args.env_id, seed, args.episodes, theirs, Path(directory)) for seed in args.seeds]
    print(f"`python {' '.join(sys.argv)}` on {os.cpu_count()} cores of {processor()}\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
