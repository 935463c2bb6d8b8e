"""The floor: independent processes that step the same environments without communicating."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np

from rayvec.bench.harness.task import ACTION_BATCHES, Task, receive, reported

__all__ = ["ClusterFloor", "Floor"]


def _step_alone(serve: Callable[[Any, Connection], None], task: Any, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with reported(pipe):
        serve(task, pipe)


def _serve(task: Task, pipe: Connection) -> None:
    """Steps environments for as long as each request says; answers with counts and times."""
    envs: list[Any] = [task.make() for _ in range(max(1, task.num_envs // task.workers))]
    for env in envs:
        env.reset(seed=0)
    actions = [0] if task.env_id is None else [envs[0].action_space.sample() for _ in range(ACTION_BATCHES)]
    chosen = itertools.cycle(actions)
    while (request := pipe.recv()) is not None:
        seconds, step_s = request
        if step_s is not None:
            for env in envs:
                env.step_s = step_s
        begin, count, inside_s = time.monotonic(), 0, 0.0
        while time.monotonic() - begin < seconds:
            for env in envs:
                before = time.monotonic()
                _, _, terminated, truncated, _ = env.step(next(chosen))
                if terminated or truncated:
                    env.reset()
                inside_s += time.monotonic() - before
            count += len(envs)
        pipe.send((count, time.monotonic() - begin, inside_s))


class Floor:
    """Independent processes that step environments in the same loop.

    Args:
        task: `workers` says how many processes.

    Attributes:
        serve: What each process does with the task and its pipe.
    """

    transport = "none"
    spans_nodes = True
    serve: Callable[[Any, Connection], None] = staticmethod(_serve)

    def __init__(self, task: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rayvec.bench.harness.floors"])
        self.num_envs = max(1, task.num_envs // task.workers) * task.workers
        self._step_s: float | None = None
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(task.workers):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=_step_alone, args=(self.serve, task, theirs), daemon=True))
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            self._processes[-1].start()  # without importing the main module again, in a Ray worker all of Ray
            sys.modules["__main__"] = main
            theirs.close()
            self._pipes.append(ours)
        self.measure(0.01)

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self._step_s = step_s

    def measure(self, seconds: float) -> tuple[int, float, float, float]:
        """Returns steps, seconds (mean of the processes), steps per second in all, and the share inside ``step``."""
        for pipe in self._pipes:
            pipe.send((seconds, self._step_s))
        counts, elapsed, inside = np.array([receive(pipe) for pipe in self._pipes]).T
        return int(counts.sum()), float(elapsed.mean()), float((counts / elapsed).sum()), inside.sum() / elapsed.sum()

    def close(self) -> None:
        """Ends them."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


class ClusterFloor:
    """The floor on the nodes of a Ray cluster: an actor on each node starts the independent processes there."""

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
        actor: Any = ray.remote(num_cpus=0)(Floor)
        self._ray, self.num_envs = ray, nodes * cores
        self._floors = [
            actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
                replace(task, num_envs=cores, workers=cores)
            )
            for node_id in found[:nodes]
        ]

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long emulated environments take."""
        self._ray.get([floor.set_step.remote(step_s, chunk_steps) for floor in self._floors])

    def measure(self, seconds: float) -> tuple[int, float, float, float]:
        """As in :class:`Floor`, over all nodes."""
        parts = self._ray.get([floor.measure.remote(seconds) for floor in self._floors])
        counts, elapsed, rates, inside = zip(*parts, strict=True)
        return sum(counts), float(np.mean(elapsed)), sum(rates), float(np.mean(inside))

    def close(self) -> None:
        """Ends them."""
        self._ray.get([floor.close.remote() for floor in self._floors])
        self._ray.shutdown()
