"""The pool of a cluster: joins the process pools of the driver's own node and of remote nodes.

The driver steps its own node through shared memory, and each remote node through a stream. Ray transfers rare requests
(starting, calls) and large data (weights, remote nodes' chunks).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import ray
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.cluster.acting import ActingNodes
from rayvec.cluster.local_node import LocalNode
from rayvec.cluster.merging import JoinedAnswers
from rayvec.cluster.nodes import Node
from rayvec.cluster.placement import check_counts, free_nodes, place_again, plan_topology, wait_for_topology
from rayvec.cluster.remote_node import RemoteNode
from rayvec.cluster.session import RaySession
from rayvec.data import Chunk, ChunkRef, ChunkSummary, NodeSlice, RawInfo, Rollout, StepBatch, Topology, Tree, tree_map
from rayvec.data.chunk_ops import join_chunks, join_summaries, summarize
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError
from rayvec.node.pipe import LOOK_S, readable
from rayvec.pools.base import RAISE, Autoreset, NotReady, PoolSpaces, Supervision
from rayvec.pools.memory import ArrayLayout
from rayvec.pools.plan import Part, Plan, Plans
from rayvec.pools.restarts import RESTARTS_OF_A_NODE, NodeState, RestartBudget

__all__ = ["RayPool"]

_CLOSE_S = 10.0
_PLACE_S = 10.0
_START_ATTEMPTS = 3
_T = TypeVar("_T")

Ask = Callable[[Node, NDArray[np.int64]], None]
"""Sends a node a request for some of its ids."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Member:
    """A node and its pending requests.

    Attributes:
        node: The node, or its replacement after a loss.
        asked: Pending requests: the node's ids, and a function that repeats the request.
    """

    node: LocalNode | RemoteNode
    asked: list[tuple[NDArray[np.int64], Ask]] = field(default_factory=list)


class RayPool:
    """Steps environments on the nodes of a Ray cluster.

    Starting takes two steps: construct the pool and read :attr:`spaces`, then call :meth:`allocate`. The shapes of
    the arrays are known only after the environments have been created.

    Args:
        factory: Creates all environments.
        topology: Which node holds which environments.
        preload: Modules that the workers' fork server imports once on each node.
        supervision: Restart policy for environments that raise, hang, or whose worker exits.
        rehost: Whether to restart the environments of a lost node elsewhere; else ``NodeLostError`` is raised.
        loose: Whether each environment is answered as soon as it has finished.
        session: Session of the connection to Ray; closing the pool releases it.

    Attributes:
        acting: The policies that act in the workers.

    Raises:
        Exception: The constructor of an environment raised it; its ``__cause__`` is an ``EnvError``.
        NodeLostError: A node was lost during the start.
    """

    steps_here = False

    def __init__(
        self,
        factory: EnvFactory,
        topology: Topology,
        preload: Sequence[str] = (),
        supervision: Supervision = RAISE,
        *,
        rehost: bool = False,
        loose: bool = False,
        session: RaySession | None = None,
    ) -> None:
        self._session = session
        self.topology = topology
        self.num_envs = topology.num_envs
        self.layout: ArrayLayout | None = None
        self.action_layout: ArrayLayout | None = None
        self._factory = factory
        self._preload = tuple(preload)
        self._supervision = supervision
        self._rehost = rehost
        self._loose = loose
        self._nodes: list[_Member] = []
        self._starts = np.array([node_slice.env_range.start for node_slice in topology.nodes])
        self._plans = Plans(self._starts)
        self._under_way = np.zeros(self.num_envs, bool)
        self._sets: dict[bytes, NDArray[np.int64]] = {}
        self._held: dict[bytes, dict[int, StepBatch]] = {}
        self.acting = ActingNodes(self._nodes, self._replace)
        self._seeds: list[int | None] = [None] * self.num_envs
        self._losses = np.zeros(self.num_envs, np.int64)
        self._answers: JoinedAnswers | None = None
        self._budget = RestartBudget()
        self._session, session = None, self._session  # if the constructor fails, its caller releases it
        try:
            self._nodes += [_Member(self._open(node_slice)) for node_slice in topology.nodes]
            starting = [member.node.start(factory) for member in self._nodes]
            spaces = [wait(None) for wait in starting]
        except BaseException:
            self.close()
            raise
        self._session = session
        sizes = [len(node_slice.env_range) for node_slice in topology.nodes]
        self.spaces = PoolSpaces.join(list(zip(sizes, spaces, strict=True)))

    @classmethod
    def open(
        cls,
        factory: EnvFactory,
        *,
        num_nodes: int | None = None,
        workers_per_node: int | None = None,
        worker_per_env: bool = False,
        claim_cpus: bool = True,
        preload: Sequence[str] = (),
        supervision: Supervision = RAISE,
        rehost: bool = False,
        address: str | None = None,
    ) -> RayPool:
        """Connects to Ray, finds nodes with free cores, and starts a pool on them.

        Args:
            factory: Creates all environments.
            num_nodes: How many nodes to use; by default all that have free cores.
            workers_per_node: Worker processes on each node; by default one for each free core.
            worker_per_env: Whether each environment gets its own worker and is answered as soon as it has finished.
            claim_cpus: Whether to claim the workers' cores from Ray, so that Ray assigns them to no other job.
            preload: As for the class.
            supervision: As for the class.
            rehost: As for the class.
            address: Address of a running Ray cluster.

        Raises:
            ConfigError: The settings are invalid, or the cluster lacks the cores for them.
        """
        check_counts(num_nodes, workers_per_node)
        session = RaySession(address)

        def plan() -> Topology:
            nodes = free_nodes(claimed_too=not claim_cpus)
            topology = plan_topology(
                nodes, factory.num_envs, num_nodes, workers_per_node, worker_per_env=worker_per_env
            )
            return topology if claim_cpus else topology.without_claims()

        try:
            for attempt in range(_START_ATTEMPTS):
                topology = wait_for_topology(plan)
                try:
                    return cls(
                        factory, topology, preload, supervision, rehost=rehost, loose=worker_per_env, session=session
                    )
                except NodeLostError as error:  # Ray may list a lost node for some seconds
                    if attempt + 1 == _START_ATTEMPTS:
                        raise
                    logger.warning("placing environments anew: %s", error)
            raise AssertionError("unreachable")
        except BaseException:
            session.release()
            raise

    def _open(self, node_slice: NodeSlice) -> LocalNode | RemoteNode:
        """Claims the cores of a node; its ``start`` then starts the workers."""
        if node_slice.node_id == ray.get_runtime_context().get_node_id():
            return LocalNode(node_slice, self._preload, self._supervision)
        return RemoteNode(node_slice, self._preload, self._supervision, self._loose)

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the shared memory of every node for these spaces, and connects to each node."""
        self._spaces = observation, action
        self.layout, self.action_layout = ArrayLayout.of(observation), ArrayLayout.of(action)
        n = self.num_envs
        obs = np.full(n, None, dtype=object) if self.layout is None else self.layout.empty((n,))
        self._answers = JoinedAnswers(obs, n)
        for number, wait in enumerate([member.node.allocate(observation, action) for member in self._nodes]):
            try:
                wait(None)
            except NodeLostError as error:
                self._replace(number, error)

    @property
    def transports(self) -> tuple[str, ...]:
        """How each node is reached: ``"shm"`` or ``"tcp"``."""
        return tuple(member.node.transport for member in self._nodes)

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plans.of(env_ids)
        whole = len(plan.parts) == 1
        for part in plan.parts:
            share = actions if whole else part.take(actions)

            def ask(node: Node, ids: NDArray[np.int64], share: Tree = share) -> None:
                node.send(ids, share, autoreset)

            self._ask(part, ask)
        self._flush(plan, autoreset == Autoreset.SAME_STEP)

    def _flush(self, plan: Plan, stays: bool | None) -> None:
        """Sends nodes their packed requests.

        Args:
            plan: Plan of the requested environments.
            stays: Whether the request always leaves them within an episode; None keeps the previous value.
        """
        assert self._answers is not None
        for part in plan.parts:
            try:
                self._nodes[part.owner].node.flush()
            except NodeLostError as error:
                self._replace(part.owner, error)  # repeats the pending requests
        self._under_way[plan.select] = True
        if not self._loose:
            self._sets[plan.key] = plan.ids
        if stays is not None:
            self._answers.started(plan.select, stays)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            self._seeds[env_id] = self._seeds[env_id] if seed is None else seed
        plan = self._plans.of(env_ids)
        for part in plan.parts:
            by_id = dict(zip(part.rows.tolist(), (seeds[i] for i in part.places.tolist()), strict=True))

            def ask(node: Node, ids: NDArray[np.int64], by_id: dict[int, int | None] = by_id) -> None:
                node.reset(ids, [by_id[i] for i in ids.tolist()], options)

            self._ask(part, ask)
        self._flush(plan, True)

    def ready(self, env_ids: NDArray[np.int64], *, begin: bool = True) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        plan = self._plans.of(env_ids)
        for part in plan.parts:
            self._ask(part, lambda node, ids: node.ready(ids, begin=begin))
        self._flush(plan, True if begin else None)

    def _ask(self, part: Part, ask: Ask) -> None:
        member = self._nodes[part.owner]
        member.asked.append((part.rows, ask))
        try:
            ask(member.node, part.rows)
        except NodeLostError as error:
            self._replace(part.owner, error)  # repeats the pending requests

    def recv(
        self,
        env_ids: NDArray[np.int64] | None = None,
        min_ready: int | None = None,
        timeout_s: float | None = None,
    ) -> StepBatch:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if env_ids is None:
            env_ids = np.flatnonzero(self._under_way)
            if min_ready is not None:
                env_ids = self._wait_for(min(min_ready, len(env_ids)), deadline)
            if not self._loose and env_ids.tobytes() not in self._sets:
                return self._recv_each(deadline)
        return self._recv_plan(self._plans.of(env_ids), deadline)

    def _recv_plan(self, plan: Plan, deadline: float | None) -> StepBatch:
        assert self._answers is not None
        held = self._held.pop(plan.key, {})
        try:
            for part in plan.parts:
                if part.owner not in held:
                    held[part.owner] = self._recv_part(part, deadline)
        except NotReady:
            for part in plan.parts:
                if part.owner in held:  # for the next attempt, or if the node is lost first
                    batch = held[part.owner] = held[part.owner].copy()
                    self._answers.keep(part.start + part.rows, batch.obs, batch.terminated, batch.truncated)
            self._held[plan.key] = held
            raise
        self._under_way[plan.select] = False
        self._sets.pop(plan.key, None)
        batch = self._answers.join(plan, [held[part.owner] for part in plan.parts])
        return batch

    def _recv_part(self, part: Part, deadline: float | None) -> StepBatch:
        member, ids = self._nodes[part.owner], part.rows
        try:
            batch = member.node.recv(ids, timeout_s=_left(deadline))
        except NodeLostError as error:
            self._replace(part.owner, error)
            batch = self._on_node(part.owner, lambda node: node.recv(ids, timeout_s=_left(deadline)))
        self._answered(member, ids)
        return batch

    def _recv_each(self, deadline: float | None) -> StepBatch:
        """Receives all pending answers, one request at a time, in the order of the requests."""
        assert self._answers is not None
        env_ids = np.flatnonzero(self._under_way)
        infos: list[RawInfo] = []
        for ids in list(self._sets.values()):
            infos += self._recv_plan(self._plans.of(ids), deadline).info
        infos.sort(key=lambda info: info.env_id)
        return self._answers.batch(env_ids, env_ids, tuple(infos))

    def _wait_for(self, min_ready: int, deadline: float | None) -> NDArray[np.int64]:
        """Waits until at least `min_ready` environments have answered, and returns their ids."""
        while True:
            found = [self._on_node(k, lambda node: node.ready_ids()) + self._starts[k] for k in range(len(self._nodes))]
            ids = np.concatenate(found)
            if len(ids) >= min_ready:
                return ids
            left = _left(deadline)
            if left == 0.0:
                raise NotReady(f"{len(ids)} of {min_ready} environments have answered in time")
            events = [member.node.event_fd for member in self._nodes]
            readable(events, LOOK_S if left is None else min(LOOK_S, left))

    @staticmethod
    def _answered(member: _Member, ids: NDArray[np.int64]) -> None:
        """Removes answered ids from the pending requests."""
        for position, (asked, _) in enumerate(member.asked):
            if asked is ids or np.array_equal(asked, ids):
                del member.asked[position]
                return
        done = set(ids.tolist())
        member.asked = [
            (left, ask)
            for asked, ask in member.asked
            if len(left := np.array([i for i in asked.tolist() if i not in done], np.int64))
        ]

    def take_begun(self, batch: StepBatch) -> NDArray[np.int64]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        return batch.env_ids[batch.terminated | batch.truncated]

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        parts = self._plans.of(env_ids).parts
        pending = {part.owner: self._nodes[part.owner].node.call(name, args, kwargs, part.rows) for part in parts}
        in_order: list[Any] = [None] * len(env_ids)

        def results(timeout_s: float | None) -> list[Any]:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            for part in parts:
                if part.owner in pending:  # else received before a timeout
                    values = pending[part.owner](_left(deadline))
                    del pending[part.owner]
                    for place, value in zip(part.places.tolist(), values, strict=True):
                        in_order[place] = value
            return in_order

        return results

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for part in self._plans.of(env_ids).parts:
            self._nodes[part.owner].node.set_attr(name, [values[i] for i in part.places.tolist()], part.rows)

    def begin_rollout(
        self, key: int, num_steps: int, first_step: int, noise_seed: int, *, by_reference: bool = False
    ) -> None:
        """See :class:`~rayvec.pools.base.ActingPool`; every worker acts over its own slice.

        With `by_reference`, each node's part of the chunk stays on that node.
        """
        self.acting.begin(key, num_steps, first_step, noise_seed, by_reference)

    def finish_rollout(self, timeout_s: float | None = None) -> Rollout:
        """See :class:`~rayvec.pools.base.ActingPool`."""
        parts, waited_s = self.acting.finish(timeout_s)
        for note in (note for part in parts for note in part.notes):
            logger.warning(note)
        chunk: Chunk | None = None
        refs: tuple[ChunkRef, ...] = ()
        if parts[0].summary is None:
            chunk = join_chunks([of_worker for part in parts for of_worker in part.chunk])
            summary = summarize(chunk)
        else:
            every = [part.summary for part in parts if part.summary is not None]
            summary = join_summaries(every)
            refs = tuple(ChunkRef(e.env_ids, e.num_steps, part.chunk) for e, part in zip(every, parts, strict=True))
        self._note_rollout(summary)
        self.acting.settle()
        return Rollout(summary, chunk, refs, tuple(times for part in parts for times in part.times), waited_s)

    def _note_rollout(self, summary: ChunkSummary) -> None:
        """Records the end of a chunk; a replacement node resumes from there."""
        assert self._answers is not None
        self._answers.started(slice(None), True)
        self._answers.keep(slice(None), summary.last_obs, summary.terminated[-1], summary.truncated[-1])

    def _on_node(self, number: int, function: Callable[[Node], _T]) -> _T:
        """Calls `function` with a node; if the node is lost, repeats the call with its replacement."""
        while True:
            try:
                return function(self._nodes[number].node)
            except NodeLostError as error:
                self._replace(number, error)

    def _replace(self, number: int, error: NodeLostError) -> None:
        """Restarts the environments of a lost node elsewhere, and repeats the pending requests there.

        Raises:
            NodeLostError: Nodes are not replaced, no core is free, or the restart budget is exhausted.
        """
        member = self._nodes[number]
        if not self._rehost:
            raise error
        with contextlib.suppress(Exception):
            member.node.close(0.0)(0.0)
        excluded: set[str] = set()
        while True:
            if not self._budget.spend(number):
                raise NodeLostError(f"{error} It is not replaced again: {RestartBudget.rule()}.") from error
            excluded.add(member.node.slice.node_id)
            try:
                self._start_elsewhere(number, place_again(member.node.slice, excluded, error), error)
                for ids, ask in member.asked:
                    ask(member.node, ids)
                member.node.flush()
                return
            except NodeLostError as again:
                if again.__cause__ is error:  # no other node has a free core
                    raise
                error = again

    def _start_elsewhere(self, number: int, node_slice: NodeSlice, error: NodeLostError) -> None:
        """Restarts the environments of a lost node from their last answers."""
        assert self._answers is not None
        member, old = self._nodes[number], self._nodes[number].node.slice
        rows = slice(old.env_range.start, old.env_range.stop)
        self._losses[rows] += 1
        logger.warning(
            "node %s is lost; environments %d to %d, seeds %s, resume on node %s: %s",
            *(old.name, rows.start, rows.stop - 1, self._seeds[rows], node_slice.name, error),
        )
        node = member.node = self._open(node_slice)
        node.wait_until_placed(_PLACE_S)
        node.start(self._factory)(None)
        obs = tree_map(lambda leaf: leaf[rows], self._answers.obs)
        state = NodeState(
            obs, self._seeds[rows], RESTARTS_OF_A_NODE * self._losses[rows], self._answers.mid_episode(rows)
        )
        node.allocate(*self._spaces, state)(None)
        self.topology = Topology((*self.topology.nodes[:number], node_slice, *self.topology.nodes[number + 1 :]))
        self.acting.install(node)

    def worker_pids(self) -> dict[str, list[int]]:
        """Returns process ids by node name: that of the workers' parent, then those of the workers.

        The parent is the fork server on the driver's own node, and the actor on a remote node.
        """
        pids: dict[str, list[int]] = {}
        for number, member in enumerate(self._nodes):
            found = self._on_node(number, lambda node: node.worker_pids())
            pids[member.node.slice.name] = found
        return pids

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and stops every worker and actor; further calls do nothing.

        Args:
            timeout_s: Seconds until remaining processes are killed, 10 by default.
        """
        deadline = time.monotonic() + (_CLOSE_S if timeout_s is None else timeout_s)
        closing = []
        for member in self._nodes:
            with contextlib.suppress(OSError):
                closing.append(member.node.close(timeout_s))
        for end in closing:
            end(_left(deadline))
        self._nodes.clear()
        if self._session is not None:
            self._session.release()
            self._session = None


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
