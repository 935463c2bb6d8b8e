"""How fast native sub-batches step through rayvec, beside processes that step the same vector environments alone.

    python benchmarks/native.py --envs cartpole envpool-cartpole envpool-breakout --repeats 7

Two workers hold one sub-batch each. The upper bound is two independent processes that each step one of the same size
in a loop. All sides exist at once and are measured in alternation; a side that is not measured is idle. With two
groups, each worker has two such sub-batches and steps one while the driver handles the other. In chunks, a policy of
two layers of 64 units (NumPy) acts in the workers, and in the independent processes. Steps per CPU-second, driver
included, depend less on what else the machine does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, Literal

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy starts its own

import numpy as np
import tyro
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from measure import interleaved
from numpy.typing import NDArray

from rayvec import RayVecEnv
from rayvec.bench.harness.machines import started_cpu_s
from rayvec.bench.harness.processes import Processes
from rayvec.bench.terminal import ratio, show_table, spread

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
        self._layers = [rng.normal(size=pair).astype(np.float32) / 8 for pair in itertools.pairwise(sizes)]

    def __call__(self, obs: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the best action of each row."""
        hidden = obs.reshape(len(obs), -1)[:, : len(self._layers[0])].astype(np.float32)
        for layer in self._layers[:-1]:
            hidden = np.tanh(hidden @ layer)
        return (hidden @ self._layers[-1]).argmax(1)


def alone(make: Callable[[int], Any], num_envs: int) -> Callable[[tuple[float, bool]], tuple[int, float]]:
    """Returns what steps a vector environment for as many seconds as a request says, with a policy or ready actions."""
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: no memory goes back to the system at each step
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)
    env = make(num_envs)
    obs, _ = env.reset()
    network = Network(int(np.prod(obs.shape[1:])), int(env.single_action_space.n))
    actions = np.random.default_rng(0).integers(env.single_action_space.n, size=(64, num_envs))

    def step(request: tuple[float, bool]) -> tuple[int, float]:
        nonlocal obs
        seconds, with_policy = request
        until, steps = time.perf_counter() + seconds, 0
        began = time.perf_counter()
        while time.perf_counter() < until:
            obs = env.step(network(obs) if with_policy else actions[steps % 64])[0]
            steps += 1
        return steps * num_envs, steps * num_envs / (time.perf_counter() - began)

    return step


class Independent(Processes):
    """Two processes that do not communicate."""

    def __init__(self, make: Callable[[int], Any], num_envs: int) -> None:
        super().__init__(alone, [(make, num_envs)] * 2)

    def measure(self, with_policy: bool, seconds: float) -> tuple[int, float]:
        """Returns the steps and the steps/s of both together."""
        taken, rates = zip(*self.ask((seconds, with_policy)), strict=True)
        return sum(taken), sum(rates)


Running = Callable[[], bool]
"""Says whether to go on."""


class Ours:
    """Native sub-batches in two workers of rayvec.

    Args:
        make: Makes a sub-batch of so many environments.
        num_envs: Environments of a sub-batch.
        groups: With 2, each worker has two sub-batches, and a group has one of each worker.
    """

    def __init__(self, make: Callable[[int], Any], num_envs: int, groups: Literal[1, 2] = 1) -> None:
        fns = [partial(make, num_envs)] * 2 * groups
        self.env = env = RayVecEnv(fns, native=True, num_nodes=0, workers_per_node=2, groups=groups)
        self.pids = [os.getpid(), *next(iter(env.worker_pids().values()))[1:]]
        obs, _ = env.reset()
        num_actions = int(env.single_action_space.n)  # type: ignore[attr-defined]
        self._actions = np.random.default_rng(0).integers(num_actions, size=(64, 2 * num_envs))
        self._network = Network(int(np.prod(obs.shape[1:])), num_actions)
        self._weights = env.publish(self._network)

    def by_step(self, running: Running) -> Iterator[int]:
        """Steps; yields how many steps each call has taken, of all environments together."""
        for k in itertools.takewhile(lambda k: running(), itertools.count()):
            self.env.step(self._actions[k % 64])
            yield self.env.num_envs

    def by_group(self, running: Running) -> Iterator[int]:
        """Steps one group while the workers step the other."""
        for group in (0, 1):
            self.env.send(self._actions[group], group)
        group = 0
        while running():
            self.env.recv(group)
            self.env.send(self._actions[group], group)
            yield self.env.num_envs // 2
            group = 1 - group
        for group in (0, 1):
            self.env.recv(group)
            yield self.env.num_envs // 2

    def in_chunks(self, running: Running) -> Iterator[int]:
        """Takes chunks one after another."""
        while running():
            self.env.rollout_workers(self._weights, CHUNK_STEPS, 0, 0)
            yield CHUNK_STEPS * self.env.num_envs

    def ahead(self, running: Running) -> Iterator[int]:
        """Takes chunks, of which the next one has always been started: what a collector with `prefetch` does."""
        self.env.rollout_async(self._weights, CHUNK_STEPS, 0, 0)
        while running():
            self.env.rollout_async(self._weights, CHUNK_STEPS, 0, 0)
            self.env.rollout_wait()
            yield CHUNK_STEPS * self.env.num_envs
        self.env.rollout_wait()
        yield CHUNK_STEPS * self.env.num_envs

    def close(self) -> None:
        """Ends the workers."""
        self.env.close()


def rate(steps: Callable[[Running], Iterator[int]], seconds: float) -> tuple[int, float]:
    """Returns the steps and the steps/s, with what was pending at the end."""
    began = time.perf_counter()
    taken = sum(steps(lambda: time.perf_counter() < began + seconds))
    return taken, taken / (time.perf_counter() - began)


def rates(pids: list[int], measure: Callable[[], tuple[int, float]]) -> tuple[float, float]:
    """Returns steps/s, and steps per CPU-second of some processes."""
    before = started_cpu_s(pids)
    steps, steps_per_s = measure()
    return steps_per_s, steps / (started_cpu_s(pids) - before)


Side = tuple[list[int], Callable[[float], tuple[int, float]]]
BOUNDS = {
    "by step": "independent",
    "by step, two groups": "independent",
    "in chunks": "independent, policy",
    "in chunks, prefetched": "independent, policy",
}
"""What each side of rayvec is compared with."""


@contextmanager
def sides(name: str) -> Iterator[dict[str, Side]]:
    """Yields the processes of each side, and what measures it for some seconds, by name."""
    make, num_envs = ENVS[name]
    with ExitStack() as stack:
        independent = stack.enter_context(closing(Independent(make, num_envs)))
        one, two = (stack.enter_context(closing(Ours(make, num_envs, groups))) for groups in (1, 2))
        yield {
            "independent": (independent.pids, partial(independent.measure, False)),
            "by step": (one.pids, partial(rate, one.by_step)),
            "by step, two groups": (two.pids, partial(rate, two.by_group)),
            "independent, policy": (independent.pids, partial(independent.measure, True)),
            "in chunks": (one.pids, partial(rate, one.in_chunks)),
            "in chunks, prefetched": (one.pids, partial(rate, one.ahead)),
        }


def main(
    envs: tuple[Literal["cartpole", "envpool-cartpole", "envpool-breakout"], ...] = tuple(ENVS),  # type: ignore[assignment]
    repeats: int = 7,
    window: float = 1.0,
) -> None:
    """Measures and prints a table.

    Args:
        envs: Which environments.
        repeats: How often each side is measured.
        window: Seconds of each measurement.
    """
    if any(name.startswith("envpool") for name in envs) and importlib.util.find_spec("envpool") is None:
        sys.exit("envpool is not installed: pip install 'rayvec[envpool]', or pass --envs cartpole")
    for name in envs:
        with sides(name) as measures:
            ways = {side: partial(rates, pids, partial(measure, window)) for side, (pids, measure) in measures.items()}
            interleaved(ways, 1)  # warms up
            found = interleaved(ways, repeats)
        rows = []
        for side, values in found.items():
            by_clock, by_cpu = zip(*values, strict=True)
            of_bound = map(ratio, (by_clock, by_cpu), zip(*found[BOUNDS.get(side, side)], strict=True))
            title = f"rayvec {side}" if side in BOUNDS else f"upper bound: {side}"
            rows.append([title, spread(by_clock), *of_bound])
        title = f"{name}, 2 x {ENVS[name][1]} environments; load average {os.getloadavg()[0]:.1f}"
        header = ["", "steps/s", "of the upper bound", "steps per CPU-second, of the upper bound's"]
        show_table(title, header, rows)


if __name__ == "__main__":
    from native import main  # the processes import this module by its name

    tyro.cli(main, description=__doc__)
