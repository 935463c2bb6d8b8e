"""The local pool, which steps environments in the driver's own process, without Ray.

Use it to debug environments, and for environments whose step costs less than a message to another process.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import ChunkRequest, Rollout, StepBatch, Topology, Tree
from rayvec.data.infos import copied
from rayvec.envs.factory import EnvFactory
from rayvec.errors import RemoteFailure
from rayvec.node.node_inference import NodeInference
from rayvec.node.object_store import check_object_store
from rayvec.pools.base import NO_RESTARTS, Autoreset, Cut, PoolSpaces, RestartPolicy
from rayvec.pools.in_process_base import FAILURES, EnvsFailed, is_ctrl_c
from rayvec.pools.make import make_pool
from rayvec.pools.shared_memory import ArrayLayout

__all__ = ["LocalPool"]

logger = logging.getLogger(__name__)


class LocalPool:
    """Steps environments in the driver's process, one after another, inside :meth:`recv`.

    It behaves like a :class:`~rayvec.cluster.ray_pool.RayPool` on one node with one worker: arguments and results are
    copies. A running step can't be interrupted, so timeouts have no effect.

    Args:
        factory: Makes all environments.
        restart_policy: The restart policy for environments that raise.
        first_id: Global index of the first environment.

    Attributes:
        acting: The policies that act in chunks.

    Raises:
        Exception: The exception that the constructor of an environment raised. Its ``__cause__`` is an ``EnvError``.
    """

    transports = ("local",)
    steps_here = True

    def __init__(self, factory: EnvFactory, restart_policy: RestartPolicy = NO_RESTARTS, first_id: int = 0) -> None:
        self.first_id = first_id
        try:
            self._pool = make_pool(factory, first_id, Topology.this_process, restart_policy)
        except EnvsFailed as failed:
            raise failed.failures[0][1].rebuild()  # noqa: B904  # rebuild() sets the cause
        self._pool.infos_stay = True
        self.begin_episodes, self.observe = self._pool.begin_episodes, self._pool.observe
        self.spaces: PoolSpaces = self._pool.spaces
        self.num_envs = self._pool.num_envs
        self.acting = NodeInference(self.num_envs)
        self.native_mode = self._pool.native_mode
        self.topology = Topology.of_this_node((0, self.num_envs))

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays for these spaces."""
        self.layout, self.action_layout = ArrayLayout.of(observation), ArrayLayout.of(action)
        self._pool.action_layout = self.action_layout
        self._pool.attach_own(self.layout)

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self.acting.note_absence()
        self._pool.send(env_ids, actions, autoreset)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self.acting.note_reset(env_ids)
        self._pool.reset(env_ids, seeds, copied(options))

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_completed: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`. Executes the pending commands now."""
        with self._logging():
            batch = self._pool.recv(env_ids)
        return batch if self.layout is not None else replace(batch, obs=deepcopy(batch.obs))

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`. Executes the call now."""
        own_args, own_kwargs = tuple(map(copied, args)), {key: copied(value) for key, value in kwargs.items()}
        results = self._pool.call(name, own_args, own_kwargs, env_ids)(None)
        try:
            copies = deepcopy(results)
        except Exception as error:
            where = f"{Topology.this_process}, in what an environment returned, which can't be copied"
            failure = RemoteFailure.capture(error, where)
            raise failure.rebuild()  # noqa: B904  # rebuild() sets the cause
        return lambda timeout_s: copies

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._pool.set_attr(name, [copied(value) for value in values], env_ids)

    def begin_rollout(self, key: int, request: ChunkRequest, part: int | None = None) -> None:
        """See :class:`~rayvec.pools.base.ActingPool`. Records the request and the current weights.

        Raises:
            ConfigError: The chunk is requested by reference and Ray is not initialised.
        """
        if request.by_reference:
            check_object_store()
        self.acting.begin(key, request)

    def finish_rollout(
        self, timeout_s: float | None = None, cut: Cut | None = None, part: int | None = None
    ) -> Rollout:
        """See :class:`~rayvec.pools.base.ActingPool`. Executes the steps now."""
        with self._logging():
            return self.acting.finish(self._pool, cut)

    def take_replaced(self) -> dict[str, int]:
        """See :class:`~rayvec.pools.base.ActingPool`. There is no worker to replace."""
        return {}

    @property
    def parts(self) -> tuple[range, ...]:
        """See :class:`~rayvec.pools.base.ActingPool`. There is one part."""
        return (range(self.num_envs),)

    def finish_any(self, parts: Sequence[int]) -> tuple[int, Rollout]:
        """See :class:`~rayvec.pools.base.ActingPool`. Executes the steps now."""
        return parts[0], self.finish_rollout()

    def worker_pids(self) -> dict[str, list[int]]:
        """Returns the id of this process, by node name."""
        return {node.name: [os.getpid()] for node in self.topology.nodes}

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments. Further calls do nothing."""
        try:
            self._pool.close()
        except FAILURES as error:
            if is_ctrl_c(error):
                raise
            logger.exception("an environment did not close in order")

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        """Logs the restarts that happen inside the block."""
        try:
            yield
        finally:
            for note in self._pool.notes:
                logger.warning(note)
            self._pool.notes.clear()
