"""The driver's own node: the driver owns the process pool, and claims the cores of its workers from Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from gymnasium import Space

from rayvec.cluster.core_claim import CoreClaim
from rayvec.cluster.node_interface import NodePart, Wait, Weights, done, node_lost
from rayvec.cluster.reachability import put
from rayvec.data import ChunkRequest, NodeSlice
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError
from rayvec.node.process_pool import ProcessPool
from rayvec.pools.base import PoolSpaces, RestartPolicy
from rayvec.pools.restart_state import NodeState

__all__ = ["LocalNode"]


class LocalNode:
    """The driver's own node: this process owns the pool.

    Args:
        node_slice: The environments, workers and cores of this node.
        preload: Modules that the workers' fork server imports once.
        restart_policy: Restart policy for environments that raise, hang, or whose worker exits.
    """

    transport = "shm"

    def __init__(self, node_slice: NodeSlice, preload: Sequence[str], restart_policy: RestartPolicy) -> None:
        self.slice = node_slice
        self._preload = preload
        self._restart_policy = restart_policy
        self._pool: ProcessPool | None = None
        self._claim = CoreClaim(node_slice.node_id, node_slice.num_cpus) if node_slice.num_cpus else None

    @property
    def _running(self) -> ProcessPool:
        assert self._pool is not None
        return self._pool

    def wait_until_placed(self, timeout_s: float) -> None:
        """Waits until Ray has reserved the cores for this node.

        Raises:
            NodeLostError: The cores did not become free in time.
        """
        try:
            is_placed = self._claim is None or self._claim.wait(timeout_s)
        except ray.exceptions.RayError as error:
            raise self._lost(error) from error
        if not is_placed:
            raise self._lost(TimeoutError(f"no {self.slice.num_cpus} free cores within {timeout_s:g} s"))

    def start(self, factory: EnvFactory) -> Wait:
        """See :class:`RemoteNode`."""

        def make(timeout_s: float | None) -> PoolSpaces:
            bounds = self.slice.worker_bounds
            self._pool = ProcessPool(
                factory.in_parts(bounds), bounds, self.slice.name, self._preload, self._restart_policy, self._lost
            )
            return self._pool.spaces

        return make

    def _lost(self, error: Exception) -> NodeLostError:
        return node_lost(self.slice, error)

    def allocate(self, observation: Space[Any], action: Space[Any], state: NodeState | None = None) -> Wait:
        """See :class:`RemoteNode`."""
        self._running.allocate(observation, action, state, self.slice.env_range.start)
        pool = self._running
        self.send, self.reset = pool.send, pool.reset
        self.begin_episodes, self.observe = pool.begin_episodes, pool.observe
        self.wait, self.take, self.completed_ids = pool.wait, pool.take, pool.completed_ids
        self.call, self.set_attr = pool.call, pool.set_attr
        return done

    def flush(self) -> None:
        """See :class:`RemoteNode`; does nothing, since requests reach the workers at once."""

    @property
    def event_fds(self) -> Sequence[int]:
        """See :class:`RemoteNode`."""
        return self._running.event_fds

    def load(self, key: int, policy: bytes, version: int, on_node: bool) -> Wait:
        """See :class:`RemoteNode`."""
        return lambda timeout_s: self._running.acting.load(key, policy, version, on_node=on_node)

    def drop(self, key: int) -> Wait:
        """See :class:`RemoteNode`."""
        return lambda timeout_s: self._running.acting.drop(key)

    def begin_rollout(self, key: int, weights: Weights | None, request: ChunkRequest) -> Wait:
        """See :class:`RemoteNode`."""
        if weights is not None:
            self._running.acting.publish(key, weights.version, weights.array)
        self._running.begin_rollout(key, request._replace(by_reference=False))

        def finish(timeout_s: float | None) -> NodePart:
            times, summary, chunk = self._running.finish_on_node(request.by_reference, timeout_s)
            part: Any = chunk
            if request.by_reference:
                part = put(chunk, f"the chunk of node {self.slice.name}")
            return NodePart(times, [], summary, part, self._running.take_replaced())

        return finish

    def release_chunk(self) -> None:
        """See :class:`RemoteNode`."""
        self._running.acting.release()

    def worker_pids(self) -> list[int]:
        """See :class:`RemoteNode`."""
        return next(iter(self._running.worker_pids().values()))

    def close(self, timeout_s: float | None = None) -> Wait:
        """See :class:`RemoteNode`."""

        def end(timeout_s: float | None) -> None:
            try:
                if self._pool is not None:
                    self._pool.close(timeout_s)
                    self._pool = None  # not before: after Ctrl-C, a second call ends the workers
            finally:
                claim, self._claim = self._claim, None
                if claim is not None:
                    claim.release()

        return end
