"""The pool of a cluster: the process pool of the driver's own node and those of other nodes, joined into one.

The driver steps its own node through shared memory, and other nodes through a stream each. What is rare (starting,
calls) and what is large (weights, other nodes' chunks) goes through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any, TypeVar

import numpy as np
import ray
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.cluster.cluster_inference import ClusterInference
from rayvec.cluster.elastic_placement import ElasticPlacement, Move
from rayvec.cluster.local_node import LocalNode
from rayvec.cluster.merge_answers import JoinedAnswers
from rayvec.cluster.node_interface import (
    Member,
    Node,
    Request,
    check_sizes,
    close_quietly,
    describe_nodes,
    join_node_parts,
    reading_others,
)
from rayvec.cluster.placement import place_again
from rayvec.cluster.ray_session import RaySession
from rayvec.cluster.remote_node import RemoteNode
from rayvec.data import ChunkRequest, ChunkSummary, NodeSlice, Rollout, StepBatch, Topology, Tree, tree_map
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, NodeLostError, WorkerLostError, without_remedy
from rayvec.node.parted_pool import PartedPool
from rayvec.pools.base import NO_RESTARTS, Autoreset, Cut, PoolSpaces, RestartPolicy, deadline_in, seconds_until
from rayvec.pools.ids_by_owner import Part, Plan
from rayvec.pools.restart_state import RESTARTS_OF_A_NODE, NodeState, RestartBudget
from rayvec.pools.shared_memory import ArrayLayout

__all__ = ["RayPool"]

_CLOSE_S = 10.0
_PLACE_S = 60.0
"""How long cores that were free a moment ago may take to be granted, and an actor to start on a busy machine."""
_LOOK_S = 0.002
"""The interval at which a wait for any node's chunk asks Ray."""
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class RayPool(PartedPool):
    """Steps environments on the nodes of a Ray cluster.

    Started in two steps, because the shapes of the arrays are known only when the environments have been
    made: construct, look at :attr:`spaces`, then :meth:`allocate`.

    Args:
        factory: Makes all environments.
        topology: Which node holds which of them.
        preload: Modules that the workers' forkserver imports once on each node.
        restart_policy: What becomes of environments that raise, hang, or whose process ends.
        rehost: Whether the environments of a lost node restart on another node; else ``NodeLostError`` is raised.
        loose: Whether environments are answered each as soon as it is done.
        elastic: Where `topology` came from, if environments move as nodes join and leave.
        session: Share in the connection to Ray, released when the pool is closed.

    Attributes:
        acting: The policies that act in the workers.
        transports: How each node of the topology is reached: ``"shm"`` or ``"tcp"``.

    Raises:
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
        NodeLostError: A node ended meanwhile.
    """

    first_id = 0
    _look_s = _LOOK_S

    def __init__(
        self,
        factory: EnvFactory,
        topology: Topology,
        preload: Sequence[str] = (),
        restart_policy: RestartPolicy = NO_RESTARTS,
        *,
        rehost: bool = False,
        loose: bool = False,
        elastic: ElasticPlacement | None = None,
        session: RaySession | None = None,
    ) -> None:
        self._session: RaySession | None = None  # a pool that does not start leaves the session to its opener
        self.topology = topology
        self._factory = factory
        self._preload = tuple(preload)
        self._restart_policy = restart_policy
        self._rehost = rehost
        self._loose = loose
        self._elastic = elastic
        self._nodes: list[Member] = []
        self.acting = ClusterInference(self._nodes, self._replace)
        self._seeds: dict[int, int] = {}
        self._answers: JoinedAnswers | None = None
        self._budget = RestartBudget()
        self._replaced: Counter[str] = Counter()
        try:
            for node_slice in topology.nodes:
                self._nodes.append(Member(self._open(node_slice)))
            for member in self._nodes:
                member.node.wait_until_placed(_PLACE_S)
            starting = [member.node.start(factory) for member in self._nodes]
            spaces: list[PoolSpaces] = [wait(None) for wait in starting]
            sizes = [found.num_envs or len(each.env_range) for found, each in zip(spaces, topology.nodes, strict=True)]
            self.spaces = PoolSpaces.join(list(zip(sizes, spaces, strict=True)))
        except BaseException:
            self.close()
            raise
        self._session = session
        self.native_mode = self.spaces.native_mode
        self._slices = list(topology.nodes)  # those of native environments count sub-batches
        for member in self._nodes:
            member.node.slice = self._in_envs(member.node.slice)
        starts = [member.node.slice.env_range.start for member in self._nodes]
        super().__init__(starts, self._nodes[-1].node.slice.env_range.stop, self.spaces.unit_bounds)
        self._note_topology()
        self._num_moves = np.zeros(self.num_envs, np.int64)

    def _in_envs(self, node_slice: NodeSlice) -> NodeSlice:
        """Returns a node's slice, counted in environments."""
        bounds = self.spaces.unit_bounds
        if bounds is None:
            return node_slice
        return replace(node_slice, worker_bounds=tuple(bounds[list(node_slice.worker_bounds)].tolist()))

    def _open(self, node_slice: NodeSlice) -> Node:
        """Claims the cores of a node; its workers are started by ``start``."""
        if node_slice.node_id == ray.get_runtime_context().get_node_id():
            return LocalNode(node_slice, self._preload, self._restart_policy)
        return RemoteNode(node_slice, self._preload, self._restart_policy, self._loose)

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Makes the shared memory of every node for these spaces, and connects to each."""
        self._spaces = observation, action
        self.layout, self.action_layout = ArrayLayout.of(observation), ArrayLayout.of(action)
        shape = (self.num_envs,)
        self._answers = JoinedAnswers(np.full(shape, None) if self.layout is None else self.layout.empty(shape), *shape)
        for number, wait in enumerate([member.node.allocate(observation, action) for member in self._nodes]):
            try:
                wait(None)
            except NodeLostError as error:
                self._replace(number, error)

    def _note_topology(self) -> None:
        self.topology, self.transports = describe_nodes(self._nodes, merge=self._elastic is not None)

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._plans.of(env_ids).check_whole()
        self._follow_cluster(from_leaving_only=True)
        resets = autoreset == Autoreset.SAME_STEP
        self._start(env_ids, lambda node, part: node.send(part.rows, part.take(actions), autoreset), resets)

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._follow_cluster()
        seeds = list(seeds)
        self._seeds.update((i, seed) for i, seed in zip(env_ids.tolist(), seeds, strict=True) if seed is not None)
        self._start(env_ids, lambda node, part: node.reset(part.rows, part.take(seeds), options), True)

    def begin_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        self._follow_cluster()
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
        assert self._answers is not None
        plan = self._plans.of(env_ids)
        for part in plan.parts:
            self._nodes[part.owner].pending.append((part, request))
            self._request(part.owner, request, part)
        for part in plan.parts:
            self._request(part.owner, methodcaller("flush"))
        self._pending[plan.select] = True
        if resets is not None:
            self._answers.requested(plan.select, resets=resets)

    def _request(self, number: int, request: Callable[..., None], *args: Part) -> None:
        """Requests something from a node. If the node is lost, its replacement repeats all pending requests."""
        try:
            request(self._nodes[number].node, *args)
        except NodeLostError as error:
            self._replace(number, error)

    def wait(self, env_ids: NDArray[np.int64], deadline: float) -> None:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        for part in self._plans.of(env_ids).parts:
            self._on_node(part.owner, methodcaller("wait", part.rows, deadline))

    def take(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        assert self._answers is not None
        plan = self._plans.of(env_ids)
        batches = []
        for part in plan.parts:
            member = self._nodes[part.owner]
            batches.append(member.node.take(part.rows))
            member.forget(part)
        self._pending[plan.select] = False
        return self._answers.join(plan, batches)

    @property
    def event_fds(self) -> Sequence[int]:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        return [fd for member in self._nodes for fd in member.node.event_fds]

    def completed_ids(self) -> NDArray[np.int64]:
        """See :class:`~rayvec.node.parted_pool.PartedPool`."""
        found = [self._on_node(number, lambda node: node.completed_ids()) for number in range(len(self._nodes))]
        return np.concatenate([part.start + ids for part, ids in zip(self.parts, found, strict=True)])

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
                    self._replace(calls[k][0], error)  # and call again, as where a worker is replaced
                    waits[k] = calls[k][1](self._nodes[calls[k][0]].node)
            return values

        return collect

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """See :class:`~rayvec.pools.base.EnvPool`."""
        for part in self._plans.of(env_ids).parts:
            self._on_node(part.owner, methodcaller("set_attr", name, part.take(list(values)), part.rows))

    def begin_rollout(self, key: int, request: ChunkRequest, part: int | None = None) -> None:
        """See :class:`~rayvec.pools.base.ActingPool`; every worker acts over its own slice.

        By reference, a part of the chunk stays on each node. A part of the pool is a node, or with elastic nodes what
        moves as a whole.
        """
        self._follow_cluster()
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
            self._replaced.update(of_node.replaced)
            for note in of_node.notes:
                logger.warning(note)
        rollout = join_node_parts(of_nodes, waited_s)
        self._note_rollout(slice(None) if part is None else self._rows(part), rollout.summary)
        return rollout

    def _first_finished(self, parts: Sequence[int]) -> int | None:
        return next((part for part in parts if self.acting.has_finished(part)), None)

    def _rows(self, part: int) -> slice:
        return slice(self.parts[part].start, self.parts[part].stop)

    def _note_rollout(self, rows: slice, summary: ChunkSummary) -> None:
        """Takes note of a chunk: a node that is lost from now on resumes from its end."""
        assert self._answers is not None
        self._answers.requested(rows, resets=True)
        self._answers.keep(rows, summary.last_obs, summary.terminated[-1], summary.truncated[-1])

    def _on_node(self, number: int, function: Callable[[Node], _T]) -> _T:
        """Does something with a node; if it is lost, with the node that replaces it."""
        while True:
            try:
                return function(self._nodes[number].node)
            except NodeLostError as error:
                self._replace(number, error)

    def _replace(self, number: int, error: NodeLostError | WorkerLostError) -> None:
        """Starts the environments of a lost node elsewhere, and asks there for what was pending.

        Raises:
            NodeLostError: Nodes are not replaced, or there is no core left.
        """
        member = self._nodes[number]
        if not self._rehost:
            raise error
        excluded, start_s = {member.node.slice.node_id}, 0.0
        while True:
            close_quietly(member.node, 0.0)
            if not self._budget.spend(number, start_s):
                raise NodeLostError(f"{error} It is not replaced again: {RestartBudget.rule()}.") from error
            began_s = time.monotonic()
            try:
                self._start_elsewhere(number, excluded, error)
                member.repeat_pending()
                return
            except NodeLostError as again:
                if again.__cause__ is error:  # there is no other place
                    raise
                excluded.add(member.node.slice.node_id)
                error, start_s = again, 0.0
            except WorkerLostError as again:  # it ended, or hung, while it made its environments
                if not self._restart_policy.restart:
                    raise
                error, start_s = again, time.monotonic() - began_s

    def _start_elsewhere(self, number: int, excluded: set[str], error: NodeLostError | WorkerLostError) -> None:
        """Starts the environments of a lost node again, in the state that they last showed.

        The driver's own node is never excluded: it is alive while the driver runs, so only its actor can have died.
        """
        lost = excluded - {ray.get_runtime_context().get_node_id()}
        if self._elastic is not None:
            place = self._elastic.replacement(number, self._slices, lost, error)
        else:
            place = place_again(self._slices[number], lost, error)
        member, envs = self._nodes[number], self.parts[number]
        what = "node %s is lost" if isinstance(error, NodeLostError) else "a worker of node %s did not start"
        logger.warning(
            f"{what}; environments %d to %d, seeds %s, resume on node %s: %s",
            *(member.node.slice.name, envs[0], envs[-1], self._seeds_of(envs), place.name, without_remedy(error)),
        )
        member.node = self._open(place)
        self._resume_on(member.node, number, place)
        self._replaced["node"] += 1

    def _seeds_of(self, env_ids: range) -> list[int | None]:
        return [self._seeds.get(env_id) for env_id in env_ids]

    def _resume_on(self, node: Node, number: int, node_slice: NodeSlice) -> None:
        """Starts a part of the environments on a node that has been opened, in the state that they last showed."""
        assert self._answers is not None
        envs, rows = self.parts[number], self._rows(number)
        self._num_moves[rows] += 1
        node.wait_until_placed(_PLACE_S)
        found = node.start(self._factory)(None)
        check_sizes(self.spaces, node_slice, found)
        node.slice = self._in_envs(node_slice)
        obs = tree_map(lambda leaf: leaf[rows], self._answers.obs)
        restarts = RESTARTS_OF_A_NODE * self._num_moves[rows]
        state = NodeState(obs, self._seeds_of(envs), restarts, self._answers.mid_episode(rows))
        node.allocate(*self._spaces, state)(None)
        self.acting.install(node)
        self._nodes[number].node, self._slices[number] = node, node_slice
        self._note_topology()

    def _follow_cluster(self, *, from_leaving_only: bool = False) -> None:
        """With elastic nodes, moves environments to nodes that joined, and away from nodes that leave.

        A move ends episodes, as the loss of a node does, but no step is lost: a part moves when all its answers have
        been received. With groups or asynchronous stepping, a part of a leaving node may move with pending requests.

        Args:
            from_leaving_only: Whether only environments of nodes that leave may move.
        """
        if self._elastic is None or not self._elastic.is_due(from_leaving_only):
            return
        moves: list[tuple[Move, Node]] = []
        try:
            for move in self._elastic.moves(self._slices, from_leaving_only):
                if (move.is_leaving or not self._nodes[move.number].pending) and self._settle(move):
                    moves.append((move, self._open(move.place)))  # their actors start at the same time
            while moves:
                self._move(*moves[0])
                moves.pop(0)
        except BaseException:
            for _, node in moves:
                close_quietly(node, 0.0)
            raise

    def _settle(self, move: Move) -> bool:
        """Waits for the part's share of pending chunks. Returns whether the part can move: not if its node is lost."""
        try:
            part = self.acting.settle(move.number)
        except NodeLostError:  # who waits for the chunk replaces it
            return False
        if part is not None:
            self._note_rollout(self._rows(move.number), join_node_parts([part], 0.0).summary)
        return True

    def _move(self, move: Move, node: Node) -> None:
        """Moves a part of the environments to a node. If they can't start there, they stay where they are."""
        assert self._elastic is not None
        member, old = self._nodes[move.number], self._nodes[move.number].node
        envs = self.parts[move.number]
        try:
            self._resume_on(node, move.number, move.place)
        except Exception as error:
            close_quietly(node, 0.0)
            self._elastic.note_failed_start(move.place.node_id)
            logger.warning("environments %d to %d can't move to node %s: %s", envs[0], envs[-1], node.slice.name, error)
            return
        logger.warning(
            "environments %d to %d, seeds %s, moved from node %s%s to node %s",
            *(envs[0], envs[-1], self._seeds_of(envs), old.slice.name),
            *(" (it leaves)" if move.is_leaving else "", node.slice.name),
        )
        close_quietly(old, _CLOSE_S)
        try:
            member.repeat_pending()
        except NodeLostError as error:
            self._replace(move.number, error)

    def take_replaced(self) -> dict[str, int]:
        """See :class:`~rayvec.pools.base.ActingPool`. Replaced workers are reported with the chunks of their nodes."""
        replaced, self._replaced = dict(self._replaced), Counter()
        return replaced

    def worker_pids(self) -> dict[str, list[int]]:
        """Process ids by the node's name: of the fork server here, or of the actor there, and of the workers.

        Where a node has several parts of the environments, it is that of the first part.
        """
        pids: dict[str, list[int]] = {}
        for number, member in enumerate(self._nodes):
            owner, *workers = self._on_node(number, lambda node: node.worker_pids())
            pids.setdefault(member.node.slice.name, [owner]).extend(workers)
        return pids

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends every worker and actor; may be called again.

        Args:
            timeout_s: After this long, 10 s by default, they are ended by force.
        """
        deadline = deadline_in(_CLOSE_S if timeout_s is None else timeout_s)
        closing = []
        for member in sorted(self._nodes, key=lambda each: each.node.transport != "shm"):  # actors close by themselves
            with contextlib.suppress(OSError):
                closing.append(member.node.close(timeout_s))
        with contextlib.ExitStack() as stack:
            if self._session is not None:
                stack.callback(self._session.release)
                self._session = None
            for end in reversed(closing):
                stack.callback(lambda each: each(seconds_until(deadline)), end)
        self._nodes.clear()  # not before: after Ctrl-C, a second call ends the rest
