"""How long starts take: of a training with a private Ray, part by part, and of environments without Ray.

    python benchmarks/start.py

Each repeat is a process of its own. It takes the steps of ``rayvec.train`` one by one; another process makes and resets
96 CartPoles in two workers without Ray, twice: the second time its fork server is running.
"""

from __future__ import annotations

import subprocess
import sys
import time

import tyro
from measure import check_repeats, heading

from rayvec.bench.terminal import show_table, spread

PARTS = ["imports", "Ray", "environments and their first observations", "learner", "all"]
CODE = """
import sys, time
laps = [float(sys.argv[1])]
lap = lambda: laps.append(time.monotonic())
import rayvec.training.loop
from rayvec.cluster.ray_session import RaySession
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

WITHOUT_RAY = ["96 environments without Ray", "the same again"]
CODE_WITHOUT_RAY = """
import time
import rayvec
rayvec.RayVecEnv
for _ in range(2):
    began = time.monotonic()
    with rayvec.RayVecEnv("CartPole-v1", 96, num_nodes=0, workers_per_node=2) as env:
        env.reset(seed=0)
        print(time.monotonic() - began)
"""


def run(code: str) -> list[float]:
    """Returns the milliseconds that a process of its own prints as seconds."""
    command = [sys.executable, "-c", code, str(time.monotonic())]
    output = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True).stdout
    return [1e3 * float(part) for part in output.split()]


def start() -> list[float]:
    """Returns the milliseconds of each part, of their sum, and of starts without Ray."""
    parts_ms = run(CODE)
    return [*parts_ms, sum(parts_ms), *run(CODE_WITHOUT_RAY)]


def main(repeats: int = 9) -> None:
    """Prints the table."""
    check_repeats(repeats)
    columns = zip(*(start() for _ in range(repeats)), strict=True)
    print(heading())
    rows = [[part, spread(each)] for part, each in zip([*PARTS, *WITHOUT_RAY], columns, strict=True)]
    show_table("Starts", ["part", "ms"], rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
