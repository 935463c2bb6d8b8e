"""How fast native sub-batches step through rayvec, beside processes that step the same vector environments alone.

    python benchmarks/native.py --envs cartpole envpool-cartpole envpool-breakout --repeats 7

Two workers hold one sub-batch each. The upper bound is two independent processes that each step one of the same size
in a loop. All sides exist at once and are measured in alternation; a side that is not measured is idle. In chunks, a
policy of two layers of 64 units (NumPy) acts in the workers, and in the independent processes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from numpy.typing import NDArray

from rayvec import RayVecEnv

CHUNK_STEPS = 32


def envpool(name: str, num_envs: int) -> Any:
    """Makes EnvPool's environment of that name, with one thread."""
    import envpool

    return envpool.make(name, env_type="gymnasium", num_envs=num_envs, num_threads=1)


ENVS: dict[str, tuple[Callable[[int], Any], int]] = {
    "cartpole": (CartPoleVectorEnv, 4096),
    "envpool-cartpole": (partial(envpool, "CartPole-v1"), 4096),
    "envpool-breakout": (partial(envpool, "Breakout-v5"), 64),
}
"""What makes a sub-batch, and how many environments it has."""


class Network:
    """Two layers of 64 units; of an image it takes 16 numbers."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        rng = np.random.default_rng(0)
        sizes = [min(num_inputs, 16), 64, 64, num_actions]
        self._layers = [rng.normal(size=pair).astype(np.float32) / 8 for pair in pairwise(sizes)]

    def __call__(self, obs: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the best action of each row."""
        hidden = obs.reshape(len(obs), -1)[:, : len(self._layers[0])].astype(np.float32)
        for layer in self._layers[:-1]:
            hidden = np.tanh(hidden @ layer)
        return (hidden @ self._layers[-1]).argmax(1)


def alone(make: Callable[[int], Any], num_envs: int, pipe: Any) -> None:
    """Steps a vector environment for as many seconds as the pipe says, with a policy or with ready actions."""
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: no memory goes back to the system at each step
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)
    env = make(num_envs)
    obs, _ = env.reset()
    network = Network(int(np.prod(obs.shape[1:])), int(env.single_action_space.n))
    actions = np.random.default_rng(0).integers(env.single_action_space.n, size=(64, num_envs))
    while True:
        seconds, with_policy = pipe.recv()
        if seconds is None:
            return
        until, steps = time.perf_counter() + seconds, 0
        began = time.perf_counter()
        while time.perf_counter() < until:
            obs = env.step(network(obs) if with_policy else actions[steps % 64])[0]
            steps += 1
        pipe.send(steps * num_envs / (time.perf_counter() - began))


class Independent:
    """Two processes that know nothing of each other."""

    def __init__(self, make: Callable[[int], Any], num_envs: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipes, self._processes = [], []
        for _ in range(2):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=alone, args=(make, num_envs, theirs), daemon=True))
            self._processes[-1].start()
            self._pipes.append(ours)

    def measure(self, seconds: float, with_policy: bool) -> float:
        """Returns the steps/s of both together."""
        for pipe in self._pipes:
            pipe.send((seconds, with_policy))
        return float(sum(pipe.recv() for pipe in self._pipes))

    def close(self) -> None:
        """Ends them."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send((None, False))
            process.join()


@contextmanager
def sides(name: str) -> Iterator[dict[str, Callable[[float], float]]]:
    """Yields what measures each side for some seconds, by name."""
    make, num_envs = ENVS[name]
    with ExitStack() as stack:
        independent = stack.enter_context(closing(Independent(make, num_envs)))
        env = stack.enter_context(
            closing(RayVecEnv([partial(make, num_envs)] * 2, native=True, num_nodes=0, workers_per_node=2))
        )
        obs, _ = env.reset()
        num_actions = int(env.single_action_space.n)  # type: ignore[attr-defined]
        network = Network(int(np.prod(obs.shape[1:])), num_actions)
        actions = np.random.default_rng(0).integers(num_actions, size=(64, env.num_envs))

        def by_step(seconds: float) -> float:
            began, steps = time.perf_counter(), 0
            while time.perf_counter() < began + seconds:
                env.step(actions[steps % 64])
                steps += 1
            return steps * env.num_envs / (time.perf_counter() - began)

        def in_chunks(seconds: float) -> float:
            began, steps = time.perf_counter(), 0
            while time.perf_counter() < began + seconds:
                env.rollout(network, CHUNK_STEPS)
                steps += CHUNK_STEPS
            return steps * env.num_envs / (time.perf_counter() - began)

        yield {
            "independent": lambda seconds: independent.measure(seconds, False),
            "by step": by_step,
            "independent, policy": lambda seconds: independent.measure(seconds, True),
            "in chunks": in_chunks,
        }


def median(values: list[float], digits: str = ",.0f") -> str:
    """Returns the median, with the smallest and the largest value."""
    return f"{statistics.median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=ENVS, default=list(ENVS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--window", type=float, default=1.0, help="seconds of each measurement")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args()
    kept: dict[str, dict[str, list[float]]] = {}
    for name in options.envs:
        with sides(name) as measures:
            found: dict[str, list[float]] = {side: [] for side in measures}
            for measure in measures.values():
                measure(options.window)  # warm-up
            for _ in range(options.repeats):
                for side, measure in measures.items():
                    found[side].append(measure(options.window))
        kept[name] = found
        print(f"\n{name}, 2 x {ENVS[name][1]} environments; load average {os.getloadavg()[0]:.1f}\n")
        print("| | steps/s | of the upper bound |\n|---|---|---|")
        for side, bound in (("by step", "independent"), ("in chunks", "independent, policy")):
            ratios = [mine / best for mine, best in zip(found[side], found[bound], strict=True)]
            print(f"| upper bound: {bound} | {median(found[bound])} | 1.00 |")
            print(f"| rayvec {side} | {median(found[side])} | {median(ratios, '.2f')} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
