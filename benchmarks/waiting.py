"""Environments that wait: rayvec by default beside the vector environments that start a process for each environment.

A step sleeps, computes, or does both in halves. Every peer is measured once in each turn, in the same process; the
figure is the number of environment steps per second. Rayvec's best is the faster of two numbers of workers: one for
each core, one for each environment.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from measure import heading, interleaved, share_modules, simulated_cluster

from rayvec.bench.terminal import show_table, spread
from rayvec.data.cores import usable_cores

KINDS = {"sleep 1 ms": (1e-3, 0.0), "sleep 5 ms": (5e-3, 0.0), "sleep 20 ms": (2e-2, 0.0)}
KINDS |= {"compute 1 ms": (0.0, 1e-3), "half 5 ms": (2.5e-3, 2.5e-3)}


class Waiting(gymnasium.Env[Any, Any]):
    """Sleeps, then computes, in each step; its one episode never ends."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, wait_s: float, work_s: float) -> None:
        self._wait_s, self._work_s = wait_s, work_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins the episode."""
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes its time."""
        if self._wait_s:
            time.sleep(self._wait_s)
        end = time.thread_time() + self._work_s
        while time.thread_time() < end:
            pass
        return np.zeros(4, np.float32), 1.0, False, False, {}


def rayvec_env(env_fns: Sequence[Any], **settings: Any) -> Any:
    """Makes rayvec's vector environment."""
    import rayvec

    return rayvec.RayVecEnv(env_fns, **settings)


def async_vector_env(env_fns: Sequence[Any]) -> Any:
    """Makes Gymnasium's."""
    return gymnasium.vector.AsyncVectorEnv(env_fns)


def tianshou_env(env_fns: Sequence[Any], kind: str) -> Any:
    """Makes one of Tianshou's."""
    import tianshou.env

    return getattr(tianshou.env, kind)(env_fns)


def sb3_env(env_fns: Sequence[Any]) -> Any:
    """Makes that of Stable-Baselines3."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return SubprocVecEnv(env_fns, start_method="fork")  # its own default imports torch in every process


def measured(make: Callable[[Sequence[Any]], Any], env_fns: Sequence[Any], seconds: float) -> tuple[float, float]:
    """Returns steps/s, and the seconds from the call of the constructor to the first observations."""
    began = time.perf_counter()
    env = make(env_fns)
    env.reset()
    start_s = time.perf_counter() - began
    actions = np.zeros(len(env_fns), np.int64)
    for _ in range(3):
        env.step(actions)
    steps, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        env.step(actions)
        steps += len(env_fns)
    env.close()
    return steps / took, start_s


def peers_of(num_envs: int, on_ray: bool) -> dict[str, Callable[[Sequence[Any]], Any]]:
    """Returns what makes the vector environments to measure."""
    tianshou_ray = partial(tianshou_env, kind="RayVectorEnv")
    nodes = 2 if on_ray else 0
    workers = {usable_cores(), num_envs // max(1, nodes)}
    ways = {f"rayvec, {k} workers": partial(rayvec_env, num_nodes=nodes, workers_per_node=k) for k in sorted(workers)}
    ours = {"rayvec": partial(rayvec_env, num_nodes=nodes), **ways}
    if on_ray:
        return {**ours, "Tianshou Ray": tianshou_ray}
    subproc = partial(tianshou_env, kind="SubprocVectorEnv")
    return {**ours, "Tianshou Subproc": subproc, "Gymnasium Async": async_vector_env, "SB3 Subproc": sb3_env}


def compare(kind: str, num_envs: int, on_ray: bool, repeats: int, seconds: float) -> list[str]:
    """Returns a row of the table: the peers' steps/s, and rayvec's by default over the best of all."""
    env_fns = [partial(Waiting, *KINDS[kind])] * num_envs
    ways = {name: partial(measured, make, env_fns, seconds) for name, make in peers_of(num_envs, on_ray).items()}
    found = interleaved(ways, repeats)
    speeds = {name: [speed for speed, _ in each] for name, each in found.items()}
    starts = {name: statistics.median(start for _, start in each) for name, each in found.items()}
    own = [name for name in speeds if name.startswith("rayvec,")]
    others = [name for name in speeds if not name.startswith("rayvec")]
    return [
        kind,
        str(num_envs),
        spread(speeds["rayvec"], ",.0f"),
        _best(speeds, own),
        _best(speeds, others),
        f"{_median_ratio(speeds, own):.2f}",
        f"{_median_ratio(speeds, others):.2f}",
        f"{starts['rayvec']:.2f} / {starts[_fastest(speeds, own)]:.2f}",
    ]


def _fastest(speeds: Mapping[str, list[float]], names: Sequence[str]) -> str:
    return max(names, key=lambda each: statistics.median(speeds[each]))


def _best(speeds: Mapping[str, list[float]], names: Sequence[str]) -> str:
    name = _fastest(speeds, names)
    return f"{name.removeprefix('rayvec, ')}: {spread(speeds[name], ',.0f')}"


def _median_ratio(speeds: Mapping[str, list[float]], names: Sequence[str]) -> float:
    """Returns rayvec's speed over that of the best, of the same turn, as the median of all turns."""
    name = _fastest(speeds, names)
    return statistics.median(a / b for a, b in zip(speeds["rayvec"], speeds[name], strict=True))


def main() -> None:
    """Measures and prints a table for each place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--where", nargs="+", choices=["local", "ray"], default=["local", "ray"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="one kind, 16 environments, without Ray, in seconds")
    args = parser.parse_args()
    if args.quick:
        args.envs, args.kinds, args.where, args.repeats, args.seconds = [16], ["sleep 5 ms"], ["local"], 1, 0.3
    share_modules()
    print(heading())
    columns = ["step", "envs", "rayvec by default", "rayvec's best", "best other", "/ own best", "/ other", "start, s"]
    for where in args.where:
        with ExitStack() as stack:
            if where == "ray":
                stack.enter_context(simulated_cluster(usable_cores(), usable_cores()))
            rows = []
            for kind in args.kinds:
                for num_envs in args.envs:
                    rows.append(compare(kind, num_envs, where == "ray", args.repeats, args.seconds))
                    print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
        place = "on two simulated nodes of Ray" if where == "ray" else "without Ray"
        show_table(f"Environments that wait, {place}, steps/s", columns, rows)


if __name__ == "__main__":
    main()
