"""Decentralized ranks as the benchmarks step them: each collects chunks with the environments of its node."""

from __future__ import annotations

import functools
import os
import pickle
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.bench.harness.rayvec_adapters import TimedPolicy
from rayvec.bench.harness.task import Adapter, Task
from rayvec.collect.collector import Collector
from rayvec.data.partition import even_bounds
from rayvec.distributed.decentralized import DecentralizedGroup
from rayvec.distributed.stragglers import Arrivals
from rayvec.learners.ranks import ClosableRanks
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Decentralized"]

_NUM_WEIGHTS, _NUM_SUMS = 9_155, 8
"""What ranks sum for each chunk: the gradient of two 64x64 nets, once for each of eight minibatches."""


class _Part(NamedTuple):
    """What a rank tells the driver of a chunk.

    Attributes:
        num_steps: Environment steps.
        sent_bytes: What it sent to other nodes in sums.
        inference_s: Seconds of inference of each worker.
    """

    num_steps: int
    sent_bytes: int
    inference_s: NDArray[np.float64]


class _Sampler:
    """What a rank holds: its environments, and gradients that it sums with the other ranks."""

    def __init__(self, task: Task, ranks: ClosableRanks, _: Arrivals) -> None:
        first, stop = even_bounds(task.num_envs, ranks.size)[ranks.rank : ranks.rank + 2]
        self._ranks, self._gradient = ranks, torch.ones(_NUM_WEIGHTS)
        makers = [task.make] * (stop - first)
        self._env = RayVecEnv(makers, num_nodes=0, workers_per_node=task.workers_per_node, first_id=first)
        self._collector = Collector(self._env, TimedPolicy(task.actions()))
        self._collector.reset(seed=first)

    def collect(self, num_steps: int) -> _Part:
        """Takes a chunk, and sums."""
        env, before = self._env, self._ranks.sent_bytes
        [chunk] = self._collector.collect(n_step=env.num_envs * num_steps).chunks
        for _ in range(_NUM_SUMS):
            self._ranks.sum_(self._gradient)
        bounds = env.topology.nodes[0].worker_bounds
        inference_s = np.add.reduceat(chunk.extras["inference_s"].sum(0), bounds[:-1])
        return _Part(env.num_envs * num_steps, self._ranks.sent_bytes - before, inference_s)

    def set_step(self, step_s: float) -> None:
        """Sets how long environments take."""
        self._env.set_attr("step_s", step_s)

    def pids(self) -> list[int]:
        """Returns this process and those of the workers."""
        return [os.getpid(), *(pid for pids in self._env.worker_pids().values() for pid in pids[1:])]

    def close(self) -> None:
        """Ends the environments."""
        self._collector.close()
        self._env.close()


class Decentralized(Adapter):
    """One rank on each node. The driver posts a chunk ahead, and gets statistics."""

    spans_nodes = True
    resets_within_steps = True

    def __init__(self, task: Task) -> None:
        from rayvec.distributed.rank_placement import ResourceRequest
        from rayvec.distributed.ray_host import RayHost

        assert task.nodes is not None and task.workers_per_node is not None
        self.num_envs, self._steps = task.num_envs, task.chunk_steps
        request = ResourceRequest(task.workers_per_node, 0, per_node=1, num_nodes=task.nodes)
        host = RayHost(request, task.address)
        self._group = DecentralizedGroup(functools.partial(_Sampler, task), task.nodes, host)
        self.transport = "ray, shm within ranks"
        pids = self._group.run("pids")
        self.node_pids = {place.node_id: each for place, each in zip(self._group.placements, pids, strict=True)}
        self._pending: deque[Any] = deque()
        self._parts: list[_Part] = []

    def advance(self) -> int:
        """Takes a chunk."""
        for _ in range(2 - len(self._pending)):
            self._pending.append(self._group.post("collect", [(self._steps,)] * self._group.num_ranks))
        self._parts = self._group.gather(self._pending.popleft())
        return sum(part.num_steps for part in self._parts)

    def settle(self) -> None:
        """Waits for the pending chunk, whose steps are not counted."""
        while self._pending:
            self._group.gather(self._pending.popleft())

    def steps_ahead(self) -> list[int] | None:
        """Steps of each worker in a chunk."""
        num_workers = sum(len(pids) - 1 for pids in self.node_pids.values())
        return [self.num_envs // num_workers * self._steps] * num_workers

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None) -> None:
        """Sets how long environments take, and T of a chunk."""
        self.settle()
        self._group.run("set_step", [(step_s,)] * self._group.num_ranks)
        self._steps = chunk_steps

    def call_inference_s(self) -> NDArray[np.float64] | None:
        """Seconds of inference of each worker in the last chunk, ``float64 [workers]``."""
        return np.concatenate([part.inference_s for part in self._parts])

    def network_bytes(self) -> int:
        """Bytes of the last chunk between nodes: sums, and what ranks tell the driver."""
        told = sum(len(pickle.dumps(part)) for part in self._parts[1:])
        return told + sum(part.sent_bytes for part in self._parts)

    def close(self) -> None:
        """Ends it."""
        self._group.close()
