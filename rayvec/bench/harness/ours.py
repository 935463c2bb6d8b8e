"""rayvec's vector environment as the benchmarks step it, from the driver and in chunks, and its bare pool."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray.util
from numpy.typing import NDArray

from rayvec.bench.harness.cpu import NodeProcesses
from rayvec.bench.harness.emulated import clock_offsets
from rayvec.bench.harness.task import Adapter, Task
from rayvec.cluster.frames import FrameFormat
from rayvec.collect.collector import Collector
from rayvec.data import StepBatch
from rayvec.data.chunk_ops import join_chunks
from rayvec.envs.factory import EnvFactory
from rayvec.node.process_pool import ProcessPool
from rayvec.policies.noise import NO_NOISE
from rayvec.pools.base import Autoreset
from rayvec.pools.memory import ArrayLayout
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["BarePool", "Ours", "TimedPolicy"]

_PACKING_REPEATS = 5


class TimedPolicy:
    """Alternates between batches of actions, as every peer does, and records in every chunk how long that took.

    Args:
        actions: Batches of at least as many as a call needs.
    """

    noise = NO_NOISE

    def __init__(self, actions: Sequence[NDArray[Any]]) -> None:
        self._actions = actions
        self._count = 0

    def act(self, obs: Any, noise: NDArray[np.float64]) -> tuple[Any, dict[str, NDArray[Any]]]:
        """Returns actions and ``inference_s``, ``float64 [k]``: an equal part of the time for each environment."""
        begin, count = time.monotonic(), len(noise)
        self._count = (self._count + 1) % len(self._actions)
        actions = self._actions[self._count][:count]
        return actions, {"inference_s": np.full(count, (time.monotonic() - begin) / count)}


class Ours(Adapter):
    """A :class:`rayvec.RayVecEnv`, stepped by ``step`` or by ``rollout``."""

    spans_nodes = True

    def __init__(self, task: Task) -> None:
        self.num_envs = task.num_envs
        plain = task.env_id is not None and task.clock_dir is None
        self.env = RayVecEnv(
            task.env_id if plain else [task.make] * task.num_envs,  # type: ignore[arg-type]
            task.num_envs,
            num_nodes=task.nodes,
            workers_per_node=task.workers_per_node,
            address=task.address,
            groups=2 if task.groups == 2 else 1,
        )
        self.env.reset(seed=0)
        self.actions = task.actions(self.env.action_space)
        self.policy = TimedPolicy(self.actions)
        transports = self.env.transports
        self.transport = "+".join(f"{kind} x {transports.count(kind)}" for kind in sorted(set(transports)))
        self.resets_within_steps = task.inference == "worker"
        if task.inference == "worker":
            self.transport = f"ray, {self.transport}"
        self._task = task
        self._collector = Collector(self.env, self.policy, prefetch=True) if task.prefetch else None
        self._steps = task.chunk_steps
        self._chunk: Any = None
        self._processes = self._node_processes()
        self._offsets = clock_offsets(self.env.get_attr) if task.env_id is None else np.zeros(task.num_envs)

    def advance(self) -> int:
        """Takes one step of every environment, or one chunk."""
        if self._collector is not None:
            self._chunk = self._collector.collect(n_step=self.num_envs * self._steps).chunks[-1]
        elif self._task.inference == "worker":
            self._chunk = self.env.rollout(self.policy, self._steps)
        elif self._task.groups == 2:
            self._chunk = self.env.rollout(self.policy, self._steps, inference="driver")
        else:
            self.env.step(self.next_actions())
            return self.num_envs
        return self.num_envs * self._steps

    def settle(self) -> None:
        """Waits for the pending chunk, whose steps are not counted."""
        if self._collector is not None:
            self._collector.drain()

    def steps_ahead(self) -> list[int] | None:
        """Steps of each worker in a chunk, with prefetch."""
        if self._collector is None:
            return None
        return [self._steps * (ids.stop - ids.start) for ids in self._worker_ids()]

    def set_step(self, step_s: float, chunk_steps: int) -> None:
        """Sets how long environments take, and T of a chunk."""
        self.settle()
        self.env.set_attr("step_s", step_s)
        self._steps = chunk_steps

    def set_inference(self, inference: str) -> None:
        """Sets where actions are chosen from now on: ``"driver"`` or ``"worker"``."""
        self._task = replace(self._task, inference=inference)

    def kinds_cpu_s(self) -> tuple[float, float]:
        """CPU time so far of all nodes' actors, and of all workers."""
        return self._processes.cpu_s()

    def _node_processes(self) -> NodeProcesses:
        here, pids, nodes = ray.util.get_node_ip_address(), self.env.worker_pids(), self.env.topology.nodes
        away = [node.node_id for node in nodes if node.address != here]
        return NodeProcesses({node.node_id: pids[node.name] for node in nodes}, away)

    def call_inference_s(self) -> NDArray[np.float64] | None:
        """Seconds of inference of each worker in the last call, ``float64 [workers]``; None where there is none."""
        if self._task.inference != "worker":
            return None
        per_env = self._chunk.extras["inference_s"].sum(0)
        return np.array([per_env[ids].sum() for ids in self._worker_ids()])

    def worker_pids(self) -> list[int]:
        """All nodes' workers."""
        return [pid for pids in self.env.worker_pids().values() for pid in pids[1:]]

    def _worker_ids(self) -> list[slice]:
        bounds = [node.worker_bounds for node in self.env.topology.nodes]
        return [slice(a, b) for part in bounds for a, b in itertools.pairwise(part)]

    def clocks(self) -> list[NDArray[np.float64]]:
        """When the steps of each worker began and ended, by this process's clock."""
        times = [clock - offset for clock, offset in zip(self.env.get_attr("clock"), self._offsets, strict=True)]
        joined = [np.concatenate(times[ids]) for ids in self._worker_ids()]
        return [worker[np.argsort(worker[:, 0])] for worker in joined]

    def packing_s(self) -> float:
        """Seconds that a call packs and unpacks, timed separately on data of the same size."""
        if self._task.inference == "worker":
            return self._chunk_packing_s()
        return self._frame_packing_s() if "tcp" in self.transport else 0.0

    def _frame_packing_s(self) -> float:
        obs_layout = ArrayLayout.of(self.env.single_observation_space)
        if obs_layout is None:  # objects, which are pickled
            return 0.0
        frames = FrameFormat(obs_layout, ArrayLayout.of(self.env.single_action_space))
        num_nodes = len(self.env.topology.nodes)
        ids = np.arange(self.num_envs // num_nodes)
        flags = np.zeros(len(ids), bool)
        answer = StepBatch(ids, obs_layout.empty((len(ids),)), np.zeros(len(ids)), flags, flags)

        def once() -> None:
            frames.unpack_request(frames.pack_step(ids, self.actions[0][: len(ids)], Autoreset.NEXT_STEP, False)[0])
            frames.unpack_answer(bytearray(frames.pack_answer(answer)[0]))

        return num_nodes * _median_s(once)

    def _chunk_packing_s(self) -> float:
        nodes = self.env.topology.nodes
        workers = nodes[0].num_workers
        part = self._chunk.columns(0, max(1, len(nodes[0].env_range) // workers))
        whole = join_chunks([part] * workers)

        def once() -> None:
            join_chunks([part] * workers)
            pickle.loads(pickle.dumps(whole, protocol=5))
            join_chunks([whole] * len(nodes))

        return _median_s(once)

    def close(self) -> None:
        """Ends it."""
        self._processes.close()
        self.env.close()


class BarePool(Adapter):
    """A :class:`ProcessPool` of one node, without Ray: what an adapter's API and the network add to."""

    transport = "shm"

    def __init__(self, task: Task) -> None:
        self.num_envs = task.num_envs
        self._pool = ProcessPool.start(EnvFactory.build([task.make] * task.num_envs), task.workers)
        self._ids = np.arange(task.num_envs)
        self._pool.reset(self._ids, list(range(task.num_envs)))
        self._pool.recv(self._ids)
        self.actions = task.single_actions(task.make().action_space)

    def advance(self) -> int:
        """Steps all."""
        self._pool.send(self._ids, self.next_actions(), Autoreset.NEXT_STEP)
        self._pool.recv(self._ids)
        return self.num_envs

    def close(self) -> None:
        """Ends it."""
        self._pool.close()


def _median_s(function: Callable[[], None]) -> float:
    times = []
    for _ in range(_PACKING_REPEATS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))
