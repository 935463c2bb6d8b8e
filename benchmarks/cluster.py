"""A cluster of simulated nodes: start, steps/s and memory by transport, and double buffering.

    python benchmarks/cluster.py speed
    python benchmarks/cluster.py speed --num-envs 96 --nodes 2 --workers-per-node 48
    python benchmarks/cluster.py groups

To compare with another version, run these with its checkout in PYTHONPATH, several times, interleaved. Efficiency over
nodes and step durations is what ``rayvec bench scaling`` measures, and CPU time of driver, nodes and workers what
``rayvec bench model`` keeps in its model.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import tyro
from measure import heading, interleaved, simulated_cluster

from rayvec.bench.terminal import ratio, show_table, spread
from rayvec.testing import TimedEnv
from rayvec.vector.ray_vec_env import RayVecEnv


def timed(step_s: float, busy: bool = False) -> Callable[[], TimedEnv]:
    """Returns what makes an environment that takes so long for a step; it has no infos, and long episodes."""
    return lambda: TimedEnv(step_s, busy, max_episode_steps=1000, infos=False)


def still(obs: Any) -> Any:
    """A policy that costs nothing."""
    return np.zeros(len(obs), np.int64)


def rate(advance: Callable[[], object], steps: int, seconds: float = 0.0) -> float:
    """Returns steps/s of calls that take so many steps each, over at least so many seconds."""
    begin, count = time.perf_counter(), 0
    while not count or time.perf_counter() - begin < seconds:
        advance()
        count += steps
    return count / (time.perf_counter() - begin)


def speed(
    num_envs: int = 64, nodes: int = 1, workers_per_node: int = 2, chunk_steps: int = 128, repeats: int = 5
) -> None:
    """CartPoles on a running cluster: seconds to the first observations, steps/s, and unique memory of a worker.

    By shm the driver's own node has workers, by tcp it has none.

    Args:
        num_envs: Environments.
        nodes: Nodes with workers.
        workers_per_node: Worker processes of each.
        chunk_steps: Steps of a chunk.
        repeats: Starts, by each transport.
    """
    print(heading())
    rows = []
    for driver_cpus in ((), (0,)):
        found: dict[str, list[float]] = {"start": [], "step": [], "chunk": [], "memory": []}
        with simulated_cluster(*driver_cpus, *[workers_per_node] * nodes):
            for _ in range(repeats):
                begin = time.perf_counter()
                with RayVecEnv("CartPole-v1", num_envs, num_nodes=nodes, workers_per_node=workers_per_node) as env:
                    env.reset(seed=0)
                    found["start"].append(time.perf_counter() - begin)
                    actions = np.zeros(num_envs, np.int64)
                    for _ in range(2):  # once to warm up
                        by_step = rate(lambda: env.step(actions), num_envs, 2.0)  # noqa: B023
                        in_chunks = rate(lambda: env.rollout(still, chunk_steps), num_envs * chunk_steps, 2.0)
                    found["step"].append(by_step)
                    found["chunk"].append(in_chunks)
                    workers = [pid for pids in env.worker_pids().values() for pid in pids[1:]]
                    found["memory"] += [psutil.Process(pid).memory_full_info().uss / 2**20 for pid in workers]
                    transports = env.transports
        transport = " + ".join(f"{kind} x {transports.count(kind)}" for kind in sorted(set(transports)))
        forms = {"start": ".2f", "step": ",.0f", "chunk": ",.0f", "memory": ".1f"}
        rows.append([transport, *(spread(found[name], form) for name, form in forms.items())])
    show_table(
        f"{num_envs} CartPoles, {nodes} x {workers_per_node} workers",
        ["", "start, s", "by step, steps/s", f"chunks of {chunk_steps}, steps/s", "unique memory of a worker, MiB"],
        rows,
    )


@dataclass(frozen=True)
class Case:
    """What double buffering is measured with.

    Attributes:
        name: For a person.
        cpus: Cores of each node, the driver's first.
        num_envs: Environments.
        env: Makes one.
        policy_s: Seconds of a call of the policy.
        busy: Whether the policy uses CPU time; else it sleeps.
        by_rows: Whether a call for half of the rows takes half as long.
    """

    name: str
    cpus: tuple[int, ...]
    num_envs: int
    env: Callable[[], Any]
    policy_s: float
    busy: bool = False
    by_rows: bool = False

    def policy(self, obs: Any) -> Any:
        """Takes its time."""
        call_s = self.policy_s * (len(obs) / self.num_envs if self.by_rows else 1.0)
        until = time.perf_counter() + call_s
        if not self.busy:
            time.sleep(call_s)
        while time.perf_counter() < until:
            pass
        return still(obs)

    def rate(self, groups: int, policy: Callable[[Any], Any], inference: Any) -> float:
        """Returns the steps/s of one rollout."""
        with RayVecEnv([self.env] * self.num_envs, workers_per_node=self.cpus[-1], groups=groups) as env:
            env.rollout(policy, 8, inference=inference, seed=0)
            steps = max(8, round(1.0 / self.policy_s))
            return rate(lambda: env.rollout(policy, steps, inference=inference), steps * self.num_envs)


CASES = (
    Case(
        "shm: 1 worker, 32 of 0.1 ms busy; policy 1.6 ms a call, busy", (1,), 32, timed(1e-4, busy=True), 1.6e-3, True
    ),
    Case("tcp: 2 workers, 4 of 10 ms asleep; policy 10 ms a call, asleep", (0, 2), 4, timed(1e-2), 1e-2),
    Case("tcp: 1 worker, 8 of 1.25 ms; policy 10 ms for all rows", (0, 1), 8, timed(1.25e-3), 1e-2, by_rows=True),
)


def groups(repeats: int = 5) -> None:
    """Double buffering: two groups against one.

    With a policy that takes p for a call, whatever its rows, and environments that take s for a step of all, two groups
    gain (s + p) / max(s, 2 p), at most 1.5. Where p falls with the rows, they gain (s + p) / max(s, p), at most 2.
    """
    print(heading())
    rows = []
    for case in CASES:
        with simulated_cluster(*case.cpus):
            ways = {
                "one": lambda case=case: case.rate(1, case.policy, "driver"),
                "two": lambda case=case: case.rate(2, case.policy, "driver"),
                "worker": lambda case=case: case.rate(1, still, "worker"),
            }
            found = interleaved(ways, repeats)
        one, two, worker = found.values()
        rows.append([case.name, spread(one), spread(two), ratio(two, one), ratio(two, worker)])
    show_table("steps/s", ["", "one group", "two groups", "two / one", "two / worker alone"], rows)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"speed": speed, "groups": groups}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
