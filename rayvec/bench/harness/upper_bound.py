"""The upper bound of steps/s: independent processes that step the same environments."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rayvec.bench.harness.processes import Processes
from rayvec.bench.harness.task import ACTION_BATCHES, Task

__all__ = ["ClusterUpperBound", "UpperBound"]

Counted = tuple[int, float, float]
"""Steps, seconds, and of them those inside ``step``."""


def stepping(task: Task) -> Callable[[tuple[float, float | None]], Counted]:
    """Returns what steps environments for as many seconds as a request says."""
    envs: list[Any] = [task.make() for _ in range(max(1, task.num_envs // task.workers))]
    for env in envs:
        env.reset(seed=0)
    actions = [0] if task.env_id is None else [envs[0].action_space.sample() for _ in range(ACTION_BATCHES)]
    chosen = itertools.cycle(actions)

    def step(request: tuple[float, float | None]) -> Counted:
        seconds, step_s = request
        if step_s is not None:
            for env in envs:
                env.unwrapped.step_s = step_s
        begin, count, inside_s = time.monotonic(), 0, 0.0
        while time.monotonic() - begin < seconds:
            for env in envs:
                before = time.monotonic()
                _, _, terminated, truncated, _ = env.step(next(chosen))
                if terminated or truncated:
                    env.reset()
                inside_s += time.monotonic() - before
            count += len(envs)
        return count, time.monotonic() - begin, inside_s

    return step


class UpperBound:
    """Independent processes that step environments in the same loop.

    Args:
        task: `workers` says how many processes.

    Attributes:
        make: Makes, in each process, what serves the requests.
    """

    transport = "none"
    spans_nodes = True
    make: Callable[[Any], Callable[[Any], Counted]] = staticmethod(stepping)

    def __init__(self, task: Task) -> None:
        self.num_envs = max(1, task.num_envs // task.workers) * task.workers
        self._step_s: float | None = None
        self._processes = Processes(self.make, [(task,)] * task.workers)
        self.measure(0.01)

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None) -> None:
        """Sets how long emulated environments take."""
        self._step_s = step_s

    def measure(self, seconds: float) -> tuple[int, float, float, float]:
        """Returns steps, seconds (mean of the processes), steps per second in all, and the share inside ``step``."""
        counts, elapsed, inside = np.array(self._processes.ask((seconds, self._step_s))).T
        return int(counts.sum()), float(elapsed.mean()), float((counts / elapsed).sum()), inside.sum() / elapsed.sum()

    def close(self) -> None:
        """Ends them."""
        self._processes.close()


class ClusterUpperBound:
    """The upper bound on the nodes of a Ray cluster: an actor on each node starts the independent processes there."""

    transport = "none"
    spans_nodes = True

    def __init__(self, task: Task) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.init(address=task.address, log_to_driver=False, logging_level=40)
        found = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        nodes, cores = task.nodes or 1, task.workers_per_node or 1
        if len(found) < nodes:
            raise ValueError(f"{nodes} nodes with cores are needed, the cluster has {len(found)}")
        actor: Any = ray.remote(num_cpus=0)(UpperBound)
        self._ray, self.num_envs = ray, nodes * cores
        self._bounds = [
            actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
                replace(task, num_envs=cores, workers=cores)
            )
            for node_id in found[:nodes]
        ]

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None) -> None:
        """Sets how long emulated environments take."""
        self._ray.get([bound.set_step.remote(step_s, chunk_steps, inference) for bound in self._bounds])

    def measure(self, seconds: float) -> tuple[int, float, float, float]:
        """As in :class:`UpperBound`, over all nodes."""
        parts = self._ray.get([bound.measure.remote(seconds) for bound in self._bounds])
        counts, elapsed, rates, inside = zip(*parts, strict=True)
        return sum(counts), float(np.mean(elapsed)), sum(rates), float(np.mean(inside))

    def close(self) -> None:
        """Ends them."""
        self._ray.get([bound.close.remote() for bound in self._bounds])
        self._ray.shutdown()
