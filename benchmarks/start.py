"""What the start of a training is made of, from the interpreter's start to the learner, with a private Ray.

    python benchmarks/start.py

Each repeat is a process of its own, which takes the steps of ``rayvec.train`` one by one.
"""

from __future__ import annotations

import subprocess
import sys
import time

import tyro
from measure import heading, markdown, spread

PARTS = ["imports", "Ray", "environments and their first observations", "learner", "all"]
CODE = """
import sys, time
laps = [float(sys.argv[1])]
lap = lambda: laps.append(time.monotonic())
import rayvec.training.loop
from rayvec.cluster.session import RaySession
from rayvec.config import PPOConfig
from rayvec.training.runs import make_env, make_learner
lap()
session = RaySession()
lap()
config = PPOConfig()
env = make_env(config)
env.reset(seed=0)
lap()
make_learner(config, env)
lap()
print(*(after - before for before, after in zip(laps, laps[1:])))
env.close()
session.release()
"""


def start() -> list[float]:
    """Returns the milliseconds that each part takes, and their sum, in a process of its own."""
    command = [sys.executable, "-c", CODE, str(time.monotonic())]
    output = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True).stdout
    parts_ms = [1e3 * float(part) for part in output.split()]
    return [*parts_ms, sum(parts_ms)]


def main(repeats: int = 9) -> None:
    """Prints the table."""
    columns = zip(*(start() for _ in range(repeats)), strict=True)
    print(heading(("ray", "torch")))
    print(markdown(["part", "ms"], [[part, spread(each)] for part, each in zip(PARTS, columns, strict=True)]))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
