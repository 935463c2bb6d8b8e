"""Where should the policy act? Steps/s of chunks with the policy in the workers, in the driver and on the node.

python benchmarks/inference.py

Without Ray, on this machine: two workers, a Nature-CNN on 84 x 84 x 4 images of bytes, and an MLP with two hidden
layers of 1,024 units. Environments return the same observation in every step, and sleep. Repeats are interleaved. Every
process computes with one thread.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import product
from typing import Literal

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy and torch start theirs

import numpy as np
import tyro
from gymnasium import spaces
from measure import interleaved

import rayvec
from rayvec.bench.harness.emulated import EmulatedEnv
from rayvec.bench.terminal import show_table, spread
from rayvec.policies.networks import make_actor_critic

IMAGES = spaces.Box(0, 255, (84, 84, 4), np.uint8)
NUMBERS = spaces.Box(-1, 1, (64,), np.float32)
WAYS: tuple[Literal["worker", "driver", "node"], ...] = ("worker", "driver", "node")


class Still(EmulatedEnv):
    """Shows the same observation all the time.

    Args:
        space: Of observations.
        step_s: Seconds that a step sleeps.
    """

    def __init__(self, space: spaces.Box, step_s: float) -> None:
        super().__init__(step_s)
        self.observation_space, self.action_space = space, spaces.Discrete(6)
        self._obs = space.sample()


def measure(space: spaces.Box, num_envs: int, step_s: float, num_steps: int, repeats: int) -> dict[str, list[float]]:
    """Returns the steps/s of each way."""
    fns = [partial(Still, space, step_s)] * num_envs
    with rayvec.RayVecEnv(fns, num_nodes=0, workers_per_node=2, preload=("torch",)) as env:
        net = make_actor_critic(space, env.single_action_space, () if space is IMAGES else (1024, 1024))
        collectors = {name: rayvec.Collector(env, rayvec.Policy(net), name, seed=1) for name in WAYS}
        ways = {name: partial(rate, each, num_steps * num_envs) for name, each in collectors.items()}
        interleaved(ways, 1)  # the first chunk of each starts what acts
        return interleaved(ways, repeats)


def rate(collector: rayvec.Collector, n_step: int) -> float:
    """Returns the steps/s of a chunk."""
    return collector.collect(n_step=n_step).stats.steps_per_s


def main(repeats: int = 3, num_steps: int = 16) -> None:
    """Prints a table.

    Args:
        repeats: How many chunks of each way are measured.
        num_steps: Steps of a chunk.
    """
    rows = []
    nets = {"Nature-CNN": IMAGES, "MLP 1024x1024": NUMBERS}
    for (net, space), num_envs, step_s in product(nets.items(), (8, 64), (0.0, 0.002)):
        rates = measure(space, num_envs, step_s, num_steps, repeats)
        rows.append([net, num_envs, f"{1000 * step_s:g}", *map(spread, rates.values())])
    show_table("Steps/s", ["", "environments", "step, ms", *WAYS], rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
