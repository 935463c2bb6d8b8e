"""PufferLib's Ray backend for benchmarks/stepping.py, in an interpreter of its own: its packages are older than ours.

    python benchmarks/pufferlib_peer.py CartPole-v1 64 2

For each number of seconds on its standard input it steps for so long, with random actions, and writes a line
`steps elapsed_s cpu_s`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from measure import cpu_s, simulated_cluster, tree


def make_env(env_id: str) -> Any:
    """Returns an environment in PufferLib's form, which resets by itself."""
    import pufferlib.emulation

    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=gymnasium.make, env_args=[env_id])


def main() -> None:
    """Serves the benchmark until it hangs up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_id")
    parser.add_argument("num_envs", type=int)
    parser.add_argument("workers", type=int)
    options = parser.parse_args()
    env_id, num_envs, workers = options.env_id, options.num_envs, options.workers
    import pufferlib.vector

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer
    before = set(tree(os.getpid()))
    with simulated_cluster(workers):
        env = pufferlib.vector.make(
            make_env, [env_id], backend=pufferlib.vector.Ray, num_envs=num_envs, num_workers=workers
        )
        rng = np.random.default_rng(0)
        actions = [rng.integers(0, env.single_action_space.n, num_envs) for _ in range(512)]
        env.reset(seed=0)
        env.step(actions[0])
        pids = [os.getpid(), *sorted(set(tree(os.getpid())) - before)]
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            seconds = float(line)
            cpu, begin, count = cpu_s(pids), time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                env.step(actions[count % len(actions)])
                count += 1
            elapsed = time.perf_counter() - begin
            print(count * num_envs, elapsed, cpu_s(pids) - cpu, file=answers, flush=True)


if __name__ == "__main__":
    main()
