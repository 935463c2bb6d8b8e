"""Starts the nodes of a pool, replaces lost ones, and moves environments as nodes join and leave the cluster."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import ray
from gymnasium import Space

from rayvec.cluster.cluster_inference import ClusterInference
from rayvec.cluster.elastic_placement import ElasticPlacement, Move
from rayvec.cluster.local_node import LocalNode
from rayvec.cluster.merge_answers import JoinedAnswers
from rayvec.cluster.node_interface import Member, Node, check_sizes, close_quietly, describe_nodes, join_node_parts
from rayvec.cluster.placement import place_again
from rayvec.cluster.ray_session import RaySession
from rayvec.cluster.reachability import check_connected
from rayvec.cluster.remote_node import RemoteNode
from rayvec.data import ChunkSummary, NodeSlice, Topology
from rayvec.data.layouts import index_tree
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError, WorkerLostError, without_remedy
from rayvec.pools.base import NO_RESTARTS, PoolSpaces, RestartPolicy, deadline_in, seconds_until
from rayvec.pools.restart_state import RESTARTS_OF_A_NODE, NodeState, RestartBudget

__all__ = ["NodeSupervisor"]

_CLOSE_S = 10.0
_PLACE_S = 60.0
"""How long cores that were free a moment ago may take to be granted, and an actor to start on a busy machine."""
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class NodeSupervisor:
    """The nodes of one pool.

    The environments of a node that is lost, or moved, begin new episodes. The old ones end as truncated, at the last
    true observation.

    Args:
        factory: Makes all environments.
        topology: Which node holds which of them.
        preload: Modules that the workers' fork server imports once on each node.
        restart_policy: What becomes of environments that raise, hang, or whose process ends.
        rehost: Whether the environments of a lost node restart on another node; else ``NodeLostError`` is raised.
        loose: Whether environments are answered each as soon as it is done.
        elastic: Where `topology` came from, if environments move as nodes join and leave.
        session: Share in the connection to Ray, released when the nodes are closed.

    Attributes:
        members: The nodes, each with its part of the environments.
        acting: The policies that act on the nodes.
        spaces: The spaces and metadata of the environments.
        parts: The environments of each node.
        topology: Which node holds which environments.
        transports: How each node of the topology is reached.
        answers: The last answer of each environment.
        seeds: The last seed that each environment was given.
        replaced: How many workers and nodes were replaced, by kind. The reader clears it.

    Raises:
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
        NodeLostError: A node ended meanwhile.
    """

    answers: JoinedAnswers

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
        self._session: RaySession | None = None  # nodes that do not start leave the session to their opener
        self._factory = factory
        self._preload = tuple(preload)
        self._restart_policy = restart_policy
        self._rehost = rehost
        self._loose = loose
        self._elastic = elastic
        self._budget = RestartBudget()
        self.seeds: dict[int, int] = {}
        self.replaced: Counter[str] = Counter()
        self.members: list[Member] = []
        self.acting = ClusterInference(self.members, self.replace)
        try:
            for place in topology.nodes:
                self.members.append(Member(self._open(place), place))
            for member in self.members:
                member.node.wait_until_placed(_PLACE_S)
            starting = [member.node.start(factory) for member in self.members]
            found: list[PoolSpaces] = [wait(None) for wait in starting]
            sizes = [each.num_envs or len(place.env_range) for each, place in zip(found, topology.nodes, strict=True)]
            self.spaces = PoolSpaces.join(list(zip(sizes, found, strict=True)))
        except BaseException:
            self.close()
            raise
        self._session = session
        for member in self.members:
            member.node.slice = self._in_envs(member.place)
        self.parts = tuple(member.node.slice.env_range for member in self.members)
        self._note_topology()

    def _in_envs(self, node_slice: NodeSlice) -> NodeSlice:
        """Returns a node's slice, counted in environments."""
        bounds = self.spaces.unit_bounds
        own = node_slice.worker_bounds
        return node_slice if bounds is None else replace(node_slice, worker_bounds=tuple(bounds[list(own)].tolist()))

    def _open(self, node_slice: NodeSlice) -> Node:
        """Claims the cores of a node; its workers are started by ``start``."""
        if node_slice.node_id == ray.get_runtime_context().get_node_id():
            return LocalNode(node_slice, self._preload, self._restart_policy)
        return RemoteNode(node_slice, self._preload, self._restart_policy, self._loose)

    def allocate(self, observation: Space[Any], action: Space[Any], answers: JoinedAnswers) -> None:
        """Makes the shared memory of every node for these spaces, and connects to each."""
        self._spaces, self.answers = (observation, action), answers
        for number, wait in enumerate([member.node.allocate(observation, action) for member in self.members]):
            self.unless_lost(number, wait, None)

    def _note_topology(self) -> None:
        self.topology, self.transports = describe_nodes(self.members, merge=self._elastic is not None)

    def unless_lost(self, number: int, request: Callable[..., object], *args: Any) -> None:
        """Requests something from a node. If the node is lost, its replacement repeats all pending requests."""
        try:
            request(*args)
        except NodeLostError as error:
            self.replace(number, error)

    def on_node(self, number: int, function: Callable[[Node], _T]) -> _T:
        """Does something with a node; if it is lost, with the node that replaces it."""
        while True:
            try:
                return function(self.members[number].node)
            except NodeLostError as error:
                self.replace(number, error)

    def replace(self, number: int, error: NodeLostError | WorkerLostError) -> None:
        """Starts the environments of a lost node elsewhere, and repeats the pending requests there.

        Raises:
            NodeLostError: Nodes are not replaced, there is no core left, or the program has shut Ray down.
        """
        check_connected(error)
        member = self.members[number]
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
        member, envs = self.members[number], self.parts[number]
        if self._elastic is not None:
            place = self._elastic.replacement(number, [each.place for each in self.members], lost, error)
        else:
            place = place_again(member.place, lost, error)
        what = "node %s is lost" if isinstance(error, NodeLostError) else "a worker of node %s did not start"
        logger.warning(
            f"{what}; environments %d to %d, seeds %s, resume on node %s: %s",
            *(member.node.slice.name, envs[0], envs[-1], self._seeds_of(envs), place.name, without_remedy(error)),
        )
        member.node = self._open(place)
        self._resume_on(member.node, number, place)
        self.replaced["node"] += 1

    def _seeds_of(self, env_ids: range) -> list[int | None]:
        return [self.seeds.get(env_id) for env_id in env_ids]

    def _resume_on(self, node: Node, number: int, place: NodeSlice) -> None:
        """Starts a part of the environments on a node that has been opened, in the state that they last showed."""
        member, envs = self.members[number], self.parts[number]
        rows = slice(envs.start, envs.stop)
        member.num_moves += 1
        node.wait_until_placed(_PLACE_S)
        check_sizes(self.spaces, place, node.start(self._factory)(None))
        node.slice = self._in_envs(place)
        restarts = np.full(len(envs), RESTARTS_OF_A_NODE * member.num_moves)
        mid_episode = self.answers.mid_episode(rows)
        state = NodeState(index_tree(self.answers.obs, rows), self._seeds_of(envs), restarts, mid_episode)
        node.allocate(*self._spaces, state)(None)
        self.acting.install(node)
        member.node, member.place = node, place
        self._note_topology()

    def follow_cluster(self, *, from_leaving_only: bool = False) -> None:
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
            for move in self._elastic.moves([member.place for member in self.members], from_leaving_only):
                if (move.is_leaving or not self.members[move.number].pending) and self._settle(move):
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
        except NodeLostError:  # the call that waits for the chunk replaces the node
            return False
        if part is not None:
            self.note_rollout(move.number, join_node_parts([part], 0.0).summary)
        return True

    def note_rollout(self, number: int | None, summary: ChunkSummary) -> None:
        """Takes note of a chunk of one part, or of all: a node that is lost from now on resumes from its end."""
        rows = slice(None) if number is None else slice(self.parts[number].start, self.parts[number].stop)
        self.answers.requested(rows, resets=True)
        self.answers.keep(rows, summary.last_obs, summary.terminated[-1], summary.truncated[-1])

    def _move(self, move: Move, node: Node) -> None:
        """Moves a part of the environments to a node. If they can't start there, they stay where they are."""
        assert self._elastic is not None
        member, envs = self.members[move.number], self.parts[move.number]
        old = member.node
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
        self.unless_lost(move.number, member.repeat_pending)

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends every worker and actor; may be called again.

        Args:
            timeout_s: After this long, 10 s by default, they are ended by force.
        """
        deadline = deadline_in(_CLOSE_S if timeout_s is None else timeout_s)
        closing = []
        for member in sorted(self.members, key=lambda each: each.node.transport != "shm"):  # actors close by themselves
            with contextlib.suppress(OSError):
                closing.append(member.node.close(timeout_s))
        with contextlib.ExitStack() as stack:
            if self._session is not None:
                stack.callback(self._session.release)
            for end in reversed(closing):
                stack.callback(lambda each: each(seconds_until(deadline)), end)
        self.members.clear()  # not before: after Ctrl-C, a second call ends the rest
