"""rayvec's vector environment as the benchmarks step it, from the driver and in chunks, and its bare pool."""

from __future__ import annotations

import itertools
import pickle
import statistics
import time
import timeit
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.bench.harness.task import Adapter, Task
from rayvec.bench.harness.vectors import VectorAdapter
from rayvec.cluster.wire_format import FrameFormat
from rayvec.collect.collector import Collector
from rayvec.data import StepBatch
from rayvec.data.join_chunks import join_chunks
from rayvec.envs.factory import EnvFactory
from rayvec.node.process_pool import ProcessPool
from rayvec.policies.noise import NO_NOISE
from rayvec.pools.base import Autoreset
from rayvec.pools.shared_memory import ArrayLayout
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


class Ours(VectorAdapter):
    """A :class:`rayvec.RayVecEnv`, stepped by ``step``, by ``rollout`` or by a ``Collector``, which can prefetch."""

    spans_nodes = True

    def __init__(self, task: Task) -> None:
        self.num_envs, self._task, self._steps = task.num_envs, task, task.chunk_steps
        self.env = RayVecEnv(
            [task.make] * task.num_envs,
            num_nodes=task.nodes,
            workers_per_node=task.workers_per_node,
            address=task.address,
            groups=2 if task.groups == 2 else 1,
        )
        self.env.reset(seed=0)
        self.actions = task.actions()
        self.policy: Any = TimedPolicy(self.actions)
        if task.hidden_sizes:
            from rayvec.policies.networks import make_actor_critic
            from rayvec.policies.policy import Policy

            spaces = self.env.single_observation_space, self.env.single_action_space
            self.policy = Policy(make_actor_critic(*spaces, task.hidden_sizes))
        transports = self.env.transports
        self.transport = "+".join(f"{kind} x {transports.count(kind)}" for kind in sorted(set(transports)))
        if task.inference == "worker" and task.nodes:
            self.transport = f"ray, {self.transport}"
        self.resets_within_steps = task.inference == "worker"
        self._collector = Collector(self.env, self.policy, prefetch=task.prefetch)
        self._chunk: Any = None
        topology = self.env.topology.nodes
        pids = self.env.worker_pids().values()
        self.node_pids = {node.node_id: list(each) for node, each in zip(topology, pids, strict=True)}
        bounds = [itertools.pairwise(node.worker_bounds) for node in topology]
        self._worker_ids = [slice(first, last) for part in bounds for first, last in part]

    def advance(self) -> int:
        """Takes one step of every environment, or one chunk."""
        if self._task.inference == "worker":  # as training does: the collector publishes only what is new
            self._chunk = self._collector.collect(n_step=self.num_envs * self._steps).chunks[-1]
        elif self._task.groups == 2 or self._task.hidden_sizes:
            self._chunk = self.env.rollout(self.policy, self._steps, inference="driver")
        else:
            return super().advance()
        return self.num_envs * self._steps

    def settle(self) -> None:
        """Waits for the pending chunk, whose steps are not counted."""
        self._collector.drain()

    def steps_ahead(self) -> list[int] | None:
        """Steps of each worker in a chunk, with prefetch."""
        if not self._task.prefetch:
            return None
        return [self._steps * (ids.stop - ids.start) for ids in self._worker_ids]

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None) -> None:
        """Sets how long environments take, T of a chunk, and where actions are chosen."""
        self.settle()
        self.env.set_attr("step_s", step_s)
        self._steps = chunk_steps
        self._task = replace(self._task, inference=inference or self._task.inference)

    def call_inference_s(self) -> NDArray[np.float64] | None:
        """Seconds of inference of each worker in the last call, ``float64 [workers]``; None where there is none."""
        if self._task.inference != "worker":
            return None
        per_env = self._chunk.extras["inference_s"].sum(0)
        return np.array([per_env[ids].sum() for ids in self._worker_ids])

    def network_bytes(self) -> int:
        """Bytes of the last call between nodes: chunks of other nodes than the driver's, or actions and answers."""
        nodes = zip(self.env.topology.nodes, self.env.transports, strict=True)
        remote = [node.worker_bounds for node, transport in nodes if transport == "tcp"]
        if self._chunk is not None:
            sent = [self._chunk.columns(bounds[0], bounds[-1]) for bounds in remote]
            return sum(len(pickle.dumps(chunk, protocol=5)) for chunk in sent)
        return sum(map(len, self._pack_frames()[1:])) * len(remote) if remote else 0

    def packing_s(self) -> float:
        """Seconds that a call packs and unpacks, timed separately on data of the same size."""
        obs_layout, num_nodes = ArrayLayout.of(self.env.single_observation_space), len(self.node_pids)
        if self._task.inference == "worker":
            workers = len(self._worker_ids) // num_nodes
            part = self._chunk.columns(0, self.num_envs // len(self._worker_ids))

            def once() -> None:
                whole = pickle.loads(pickle.dumps(join_chunks([part] * workers), protocol=5))
                join_chunks([whole] * num_nodes)

            return statistics.median(timeit.repeat(once, number=1, repeat=_PACKING_REPEATS))
        if "tcp" not in self.transport or obs_layout is None:  # in shared memory, or objects, which are pickled
            return 0.0

        def frame() -> None:
            frames, request, answer = self._pack_frames()
            frames.unpack_request(request)
            frames.unpack_answer(bytearray(answer))

        return num_nodes * statistics.median(timeit.repeat(frame, number=1, repeat=_PACKING_REPEATS))

    def _pack_frames(self) -> tuple[FrameFormat, Any, Any]:
        """Returns the format, and the request and the answer of a step on one node; observations are arrays."""
        obs_layout = ArrayLayout.of(self.env.single_observation_space)
        assert obs_layout is not None
        frames = FrameFormat(obs_layout, ArrayLayout.of(self.env.single_action_space))
        ids = np.arange(self.num_envs // len(self.node_pids))
        flags = np.zeros(len(ids), bool)
        answer = StepBatch(ids, obs_layout.empty((len(ids),)), np.zeros(len(ids)), flags, flags)
        request = frames.pack_step(ids, self.actions[0][: len(ids)], Autoreset.NEXT_STEP, False)[0]
        return frames, request, frames.pack_answer(answer)[0]


class BarePool(Adapter):
    """A :class:`ProcessPool` of one node, without Ray: what an adapter's API and the network add to."""

    transport = "shm"

    def __init__(self, task: Task) -> None:
        self.num_envs = task.num_envs
        self._pool = ProcessPool.start(EnvFactory.build([task.make] * task.num_envs), task.workers)
        self._ids = np.arange(task.num_envs)
        self._pool.reset(self._ids, list(range(task.num_envs)))
        self._pool.recv(self._ids)
        self.actions = task.actions()

    def advance(self) -> int:
        """Steps all."""
        self._pool.send(self._ids, self.next_actions(), Autoreset.NEXT_STEP)
        self._pool.recv(self._ids)
        return self.num_envs

    def close(self) -> None:
        """Ends it."""
        self._pool.close()
