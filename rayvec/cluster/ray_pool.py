"""The pool of a cluster: the process pool of the driver's own node and those of other nodes, joined into one.

The driver steps its own node through shared memory, and other nodes through a stream each. What is rare (starting,
calls) and what is large (weights, other nodes' chunks) goes through Ray.
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
from rayvec.cluster.placement import place_again
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
_PLACE_S = 60.0
"""How long cores that were free a moment ago may take to be granted, and an actor to start on a busy machine."""
_T = TypeVar("_T")

Ask = Callable[[Node, NDArray[np.int64]], None]
"""Asks a node for something, for those of its ids that are named."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Member:
    """A node and what it was asked for.

    Attributes:
        node: The node; another one takes its place if it is lost.
        asked: What is pending: the node's ids, and how to ask once more.
    """

    node: LocalNode | RemoteNode
    asked: list[tuple[NDArray[np.int64], Ask]] = field(default_factory=list)


class RayPool:
    """Steps environments on the nodes of a Ray cluster.

    Started in two steps, because the shapes of the arrays are known only when the environments have been
    made: construct, look at :attr:`spaces`, then :meth:`allocate`.

    Args:
        factory: Makes all environments.
        topology: Which node holds which of them.
        preload: Modules that the workers' forkserver imports once on each node.
        supervision: What becomes of environments that raise, hang, or whose process ends.
        rehost: Whether the environments of a lost node restart on another node; else ``NodeLostError`` is raised.
        loose: Whether environments are answered each as soon as it is done.
        session: Share in the connection to Ray, released when the pool is closed.

    Attributes:
        acting: The policies that act in the workers.

    Raises:
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
        NodeLostError: A node ended meanwhile.
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
        self._session, session = None, self._session  # a pool that does not come to be leaves it to its opener
        try:
            for node_slice in topology.nodes:
                self._nodes.append(_Member(self._open(node_slice)))
            for member in self._nodes:
                member.node.wait_until_placed(_PLACE_S)
            starting = [member.node.start(factory) for member in self._nodes]
            spaces = [wait(None) for wait in starting]
        except BaseException:
            self.close()
            raise
        self._session = session
        sizes = [len(node_slice.env_range) for node_slice in topology.nodes]
        self.spaces = PoolSpaces.join(list(zip(sizes, spaces, strict=True)))

    def _open(self, node_slice: NodeSlice) -> LocalNode | RemoteNode:
        """Claims the cores of a node; its workers are started by ``start``."""
        if node_slice.node_id == ray.get_runtime_context().get_node_id():
            return LocalNode(node_slice, self._preload, self._supervision)
        return RemoteNode(node_slice, self._preload, self._supervision, self._loose)

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Makes the shared memory of every node for these spaces, and connects to each."""
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
        """Tells nodes what they were asked for.

        Args:
            plan: Of the environments concerned.
            stays: Whether they are within an episode afterwards in any case; None if they are what they were.
        """
        assert self._answers is not None
        for part in plan.parts:
            try:
                self._nodes[part.owner].node.flush()
            except NodeLostError as error:
                self._replace(part.owner, error)  # which asks for what is under way
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
            self._replace(part.owner, error)  # which asks for what is under way

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
                if part.owner in held:  # for the next attempt, and in case that the node is lost before it
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
        """Receives everything under way, set by set as it was asked for."""
        assert self._answers is not None
        env_ids = np.flatnonzero(self._under_way)
        infos: list[RawInfo] = []
        for ids in list(self._sets.values()):
            infos += self._recv_plan(self._plans.of(ids), deadline).info
        infos.sort(key=lambda info: info.env_id)
        return self._answers.batch(env_ids, env_ids, tuple(infos))

    def _wait_for(self, min_ready: int, deadline: float | None) -> NDArray[np.int64]:
        """Returns the ids that are ready, once there are enough of them."""
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
        """Forgets how to ask for what has been answered."""
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
                if part.owner in pending:  # else it came before a timeout
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

        By reference, a part of the chunk stays on each node.
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
        """Takes note of a chunk: a node that is lost from now on resumes from its end."""
        assert self._answers is not None
        self._answers.started(slice(None), True)
        self._answers.keep(slice(None), summary.last_obs, summary.terminated[-1], summary.truncated[-1])

    def _on_node(self, number: int, function: Callable[[Node], _T]) -> _T:
        """Does something with a node; if it is lost, with the node that replaces it."""
        while True:
            try:
                return function(self._nodes[number].node)
            except NodeLostError as error:
                self._replace(number, error)

    def _replace(self, number: int, error: NodeLostError) -> None:
        """Starts the environments of a lost node elsewhere, and asks there for what was pending.

        Raises:
            NodeLostError: Nodes are not replaced, or there is no core left.
        """
        member = self._nodes[number]
        if not self._rehost:
            raise error
        excluded: set[str] = set()
        while True:
            with contextlib.suppress(Exception):
                member.node.close(0.0)(0.0)
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
                if again.__cause__ is error:  # there is no other place
                    raise
                error = again

    def _start_elsewhere(self, number: int, node_slice: NodeSlice, error: NodeLostError) -> None:
        """Starts the environments of a lost node again, in the state that they last showed."""
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
        """Process ids by the node's name: of what started the workers and ends with them, and of the workers.

        That is the fork server on the driver's own node, and the actor on another.
        """
        pids: dict[str, list[int]] = {}
        for number, member in enumerate(self._nodes):
            found = self._on_node(number, lambda node: node.worker_pids())
            pids[member.node.slice.name] = found
        return pids

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends every worker and actor; may be called again.

        Args:
            timeout_s: After this long, 10 s by default, they are ended by force.
        """
        deadline = time.monotonic() + (_CLOSE_S if timeout_s is None else timeout_s)
        closing = []
        for member in self._nodes:
            with contextlib.suppress(OSError):
                closing.append(member.node.close(timeout_s))
        self._nodes.clear()
        with contextlib.ExitStack() as stack:
            if self._session is not None:
                stack.callback(self._session.release)
                self._session = None
            for end in reversed(closing):
                stack.callback(end, _left(deadline))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
