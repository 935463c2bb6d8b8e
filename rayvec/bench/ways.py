"""The ways in which rayvec steps environments of several nodes, as a benchmark measures them."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.collect.collector import Collector
from rayvec.distributed.rank_group import RankGroup
from rayvec.distributed.rank_placement import ResourceRequest
from rayvec.distributed.ray_host import RayHost
from rayvec.learners.ranks import Ranks
from rayvec.policies.noise import NO_NOISE
from rayvec.vector.ray_vec_env import RayVecEnv

_NUM_ACTIONS = 64
_NUM_WEIGHTS, _NUM_SUMS = 9_155, 8
"""What ranks sum for each chunk: the gradient of two networks of 64x64 units, once for each of eight minibatches."""

Env = str | Callable[[], Any]
"""An environment id, or what makes an environment."""


def steps_per_s(advance: Callable[[], int], seconds: float) -> float:
    """Returns the steps/s of whole calls that take at least so many seconds together."""
    steps, began = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < seconds or not steps:
        steps += advance()
    return steps / elapsed_s


class Way(Protocol):
    """What steps environments."""

    def set_step(self, step_s: float) -> None:
        """Sets how long a step of emulated environments takes."""

    def measure(self, way: str, seconds: float, chunk_steps: int) -> float:
        """Returns the steps/s of a way that it knows."""

    def close(self) -> None:
        """Ends the environments."""


class RandomActions:
    """A policy that alternates between batches of actions.

    Args:
        actions: Batches of at least as many as a call needs.
    """

    noise = NO_NOISE

    def __init__(self, actions: Sequence[NDArray[Any]]) -> None:
        self._actions, self._count = actions, 0

    def act(self, obs: Any, noise: NDArray[np.float64]) -> tuple[Any, dict[str, NDArray[Any]]]:
        """Returns the next batch."""
        self._count += 1
        return self._actions[self._count % len(self._actions)][: len(noise)], {}


def _random_actions(env: RayVecEnv) -> list[NDArray[Any]]:
    env.action_space.seed(0)
    return [np.asarray(env.action_space.sample()) for _ in range(_NUM_ACTIONS)]


class Central:
    """A :class:`~rayvec.RayVecEnv` over all nodes: ``"driver"`` steps it, ``"worker"`` collects chunks.

    Args:
        env: Of each core.
        num_nodes: How many.
        cores_per_node: Environments of each.
        address: Of the cluster.
    """

    def __init__(self, env: Env, num_nodes: int, cores_per_node: int, address: str) -> None:
        where: Any = {"num_nodes": num_nodes, "workers_per_node": cores_per_node, "address": address}
        count = num_nodes * cores_per_node
        self._env = RayVecEnv(env, count, **where) if isinstance(env, str) else RayVecEnv([env] * count, **where)
        self._env.reset(seed=0)
        self._actions, self._count = _random_actions(self._env), 0
        self._policy = RandomActions(self._actions)

    def set_step(self, step_s: float) -> None:
        """Sets how long a step of emulated environments takes."""
        self._env.set_attr("step_s", step_s)

    def measure(self, way: str, seconds: float, chunk_steps: int) -> float:
        """Steps, or collects as off-policy learners do: workers continue while the driver receives a chunk."""
        if way == "driver":
            self._env.reset(seed=0)
            return steps_per_s(self._step, seconds)
        collector = Collector(self._env, self._policy, prefetch=True)
        collector.reset()
        n_step = chunk_steps * self._env.num_envs
        try:
            return steps_per_s(lambda: collector.collect(n_step=n_step).stats.n_collected_steps, seconds)
        finally:
            collector.drop_pending()

    def _step(self) -> int:
        self._count += 1
        self._env.step(self._actions[self._count % _NUM_ACTIONS])
        return self._env.num_envs

    def close(self) -> None:
        """Ends the environments."""
        self._env.close()


class _Rank:
    """What a decentralized rank holds: the environments of its node, and a gradient that it sums with the others."""

    def __init__(self, env: Env, num_envs: int, ranks: Ranks) -> None:
        self._ranks, self._gradient = ranks, torch.ones(_NUM_WEIGHTS)
        first = ranks.rank * num_envs
        where: Any = {"num_nodes": 0, "workers_per_node": num_envs, "first_id": first}
        self._env = RayVecEnv(env, num_envs, **where) if isinstance(env, str) else RayVecEnv([env] * num_envs, **where)
        self._env.reset(seed=first)
        self._collector = Collector(self._env, RandomActions(_random_actions(self._env)))

    def collect(self, num_steps: int) -> int:
        """Takes a chunk, sums, and returns the number of steps."""
        count = self._collector.collect(n_step=self._env.num_envs * num_steps).stats.n_collected_steps
        for _ in range(_NUM_SUMS):
            self._ranks.all_reduce_(self._gradient)
        return count

    def set_step(self, step_s: float) -> None:
        """Sets how long a step of emulated environments takes."""
        self._env.set_attr("step_s", step_s)

    def close(self) -> None:
        """Ends the environments."""
        self._env.close()


class Decentralized:
    """One rank on each node, which collects chunks with the environments of its node and then sums a gradient.

    Args:
        env: Of each core.
        num_nodes: How many.
        cores_per_node: Environments of each.
        address: Of the cluster.
    """

    def __init__(self, env: Env, num_nodes: int, cores_per_node: int, address: str) -> None:
        request = ResourceRequest(cores_per_node, 0, num_nodes=num_nodes)
        self._group = RankGroup(functools.partial(_Rank, env, cores_per_node), num_nodes, RayHost(request, address))

    def set_step(self, step_s: float) -> None:
        """Sets how long a step of emulated environments takes."""
        self._group.run("set_step", [(step_s,)] * self._group.num_ranks)

    def measure(self, way: str, seconds: float, chunk_steps: int) -> float:
        """Collects chunks; the driver has always requested the next one."""
        pending: deque[Any] = deque()

        def advance() -> int:
            while len(pending) < 2:
                pending.append(self._group.post("collect", [(chunk_steps,)] * self._group.num_ranks))
            return sum(self._group.gather(pending.popleft()))

        try:
            return steps_per_s(advance, seconds)
        finally:
            while pending:
                self._group.gather(pending.popleft())

    def close(self) -> None:
        """Ends the ranks."""
        self._group.close()
