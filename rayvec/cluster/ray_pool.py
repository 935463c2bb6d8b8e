"""The pool of a cluster: the process pool of the driver's own node and those of other nodes, joined into one.

The driver steps its own node through shared memory, and other nodes through a stream each. What is rare (starting,
calls) and what is large (weights, other nodes' chunks) goes through Ray.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.cluster.merge_answers import JoinedAnswers
from rayvec.cluster.node_interface import Request, join_node_parts, reading_others
from rayvec.cluster.node_supervisor import NodeSupervisor
from rayvec.data import ChunkRequest, Rollout, StepBatch, Topology, Tree
from rayvec.data.chunk import Cut
from rayvec.data.layouts import ArrayLayout
from rayvec.errors import ConfigError, NodeLostError
from rayvec.node.parted_pool import PartedPool
from rayvec.pools.base import Autoreset, deadline_in, seconds_until
from rayvec.pools.ids_by_owner import Plan

__all__ = ["RayPool"]

_LOOK_S = 0.002
"""The interval at which a wait for any node's chunk asks Ray."""

logger = logging.getLogger(__name__)


class RayPool(PartedPool):
    """Steps environments on the nodes of a Ray cluster.

    Started in two steps, because the shapes of the arrays are known only when the environments have been
    made: construct, look at :attr:`spaces`, then :meth:`allocate`.

    Args:
        supervisor: The nodes, which have made their environments. The pool closes them.

    Attributes:
        acting: The policies that act in the workers.
    """

    first_id = 0
    _look_s = _LOOK_S

    def __init__(self, supervisor: NodeSupervisor) -> None:
        self._supervisor = supervisor
        self._nodes, self.acting, self.spaces = supervisor.members, supervisor.acting, supervisor.spaces
        self.native_mode = self.spaces.native_mode
        starts = [part.start for part in supervisor.parts]
        super().__init__(starts, supervisor.parts[-1].stop, self.spaces.unit_bounds)

    @property
    def topology(self) -> Topology:
        """Which node holds which environments."""
        return self._supervisor.topology

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node of the topology is reached: ``"shm"`` or ``"tcp"``."""
        return self._supervisor.transports

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Makes the shared memory of every node for these spaces, and connects to each."""
        self.layout, self.action_layout = ArrayLayout.of(observation), ArrayLayout.of(action)
        self._supervisor.allocate(observation, action, JoinedAnswers(self.layout, self.num_envs))

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._plans.of(env_ids).check_whole()
        self._supervisor.follow_cluster(from_leaving_only=True)
        resets = autoreset == Autoreset.SAME_STEP
        self._start(env_ids, lambda node, part: node.send(part.rows, part.take(actions), autoreset), resets)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._supervisor.follow_cluster()
        seeds = list(seeds)
        self._supervisor.seeds.update(
            (i, seed) for i, seed in zip(env_ids.tolist(), seeds, strict=True) if seed is not None
        )
        self._start(env_ids, lambda node, part: node.reset(part.rows, part.take(seeds), options), True)

    def begin_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._supervisor.follow_cluster()
        self._start(env_ids, lambda node, part: node.begin_episodes(part.rows), True)

    def observe(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._start(env_ids, lambda node, part: node.observe(part.rows), None)

    def _start(self, env_ids: NDArray[np.int64], request: Request, resets: bool | None) -> None:
        """Starts a request on each node that holds some of the environments.

        Args:
            env_ids: The environments.
            request: Requests it for a part of them.
            resets: See :meth:`~rayvec.pools.restart_state.LastAnswers.requested`. None if the request only reads.
        """
        plan = self._plans.of(env_ids)
        for part in plan.parts:
            member = self._nodes[part.owner]
            member.pending.append((part, request))
            self._supervisor.unless_lost(part.owner, request, member.node, part)
        for part in plan.parts:
            self._supervisor.unless_lost(part.owner, self._nodes[part.owner].node.flush)
        self._pending[plan.select] = True
        if resets is not None:
            self._supervisor.answers.requested(plan.select, resets=resets)

    def wait(self, env_ids: NDArray[np.int64], deadline: float) -> None:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        for part in self._plans.of(env_ids).parts:
            self._supervisor.on_node(part.owner, methodcaller("wait", part.rows, deadline))

    def take(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        plan = self._plans.of(env_ids)
        batches = []
        for part in plan.parts:
            member = self._nodes[part.owner]
            batches.append(member.node.take(part.rows))
            member.forget(part)
        self._pending[plan.select] = False
        return self._supervisor.answers.join(plan, batches)

    @property
    def event_fds(self) -> Sequence[int]:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        return [fd for member in self._nodes for fd in member.node.event_fds]

    def completed_ids(self) -> NDArray[np.int64]:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        on_node, ids_of = self._supervisor.on_node, methodcaller("completed_ids")
        return np.concatenate([part.start + on_node(number, ids_of) for number, part in enumerate(self.parts)])

    def _call_owners(
        self, plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[float | None], list[Any]]:
        calls = [(part.owner, methodcaller("call", name, args, kwargs, part.rows)) for part in plan.parts]
        waits = [call(self._nodes[owner].node) for owner, call in calls]
        values: list[Any] = []

        def collect(timeout_s: float | None) -> list[Any]:
            deadline = deadline_in(timeout_s)
            while (k := len(values)) < len(waits):  # the values of earlier ones came before a timeout
                try:
                    with reading_others(waits[k + 1 :], deadline):
                        values.append(waits[k](seconds_until(deadline)))
                except NodeLostError as error:
                    self._supervisor.replace(calls[k][0], error)  # and call again, as where a worker is replaced
                    waits[k] = calls[k][1](self._nodes[calls[k][0]].node)
            return values

        return collect

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for part in self._plans.of(env_ids).parts:
            self._supervisor.on_node(part.owner, methodcaller("set_attr", name, part.take(list(values)), part.rows))

    def begin_rollout(self, key: int, request: ChunkRequest, part: int | None = None) -> None:
        """See :class:`~rayvec.pools.base.ActingPool`; every worker acts over its own slice.

        By reference, a part of the chunk stays on each node. A part of the pool is a node, or with elastic nodes what
        moves as a whole.
        """
        self._supervisor.follow_cluster()
        self.acting.begin(key, request, part)

    def finish_rollout(
        self, timeout_s: float | None = None, cut: Cut | None = None, part: int | None = None
    ) -> Rollout:
        """See :class:`~rayvec.pools.base.ActingPool`.

        Raises:
            ConfigError: `cut` is given.
        """
        if cut is not None:
            raise ConfigError(
                "A chunk can be cut on one machine only.",
                expected="no `cut` for environments on nodes of Ray",
                got="one",
                remedy="Leave it out, or pass num_nodes=0.",
            )
        of_nodes, waited_s = self.acting.finish(timeout_s, part)
        for of_node in of_nodes:
            self._supervisor.replaced.update(of_node.replaced)
            for note in of_node.notes:
                logger.warning(note)
        rollout = join_node_parts(of_nodes, waited_s)
        self._supervisor.note_rollout(part, rollout.summary)
        return rollout

    def _first_finished(self, parts: Sequence[int]) -> int | None:
        return next((part for part in parts if self.acting.has_finished(part)), None)

    def take_replaced(self) -> dict[str, int]:
        """See :class:`~rayvec.pools.base.ActingPool`. Replaced workers are reported with the chunks of their nodes."""
        replaced, self._supervisor.replaced = self._supervisor.replaced, Counter()
        return dict(replaced)

    def worker_pids(self) -> dict[str, list[int]]:
        """Process ids by the node's name: of the fork server here, or of the actor there, and of the workers.

        Where a node has several parts of the environments, it is that of the first part.
        """
        pids: dict[str, list[int]] = {}
        for number, member in enumerate(self._nodes):
            owner, *workers = self._supervisor.on_node(number, lambda node: node.worker_pids())
            pids.setdefault(member.node.slice.name, [owner]).extend(workers)
        return pids

    def close(self, timeout_s: float | None = None) -> None:
        """See :meth:`~rayvec.cluster.node_supervisor.NodeSupervisor.close`."""
        self._supervisor.close(timeout_s)
