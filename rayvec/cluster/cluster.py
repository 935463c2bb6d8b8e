"""The environments of a cluster: a fleet of nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space

from rayvec.data.topology import NodeSlice, Topology
from rayvec.data.trees import ArrayLayout
from rayvec.errors import NodeLostError, WorkerLostError
from rayvec.fleet.commands import STEPPING, ChildLost, Command, Op, Ticket
from rayvec.fleet.fleet import CLOSE_S, Fleet, is_here, started
from rayvec.fleet.restarts import RESTARTS_OF_A_NODE, own_arrays

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class Cluster(Fleet):
    """A fleet of nodes. The constructor starts them; :meth:`allocate` follows, once their spaces are known.

    Args:
        topology: Where they are, and how many workers each has.
        places: Finds the places of nodes, and opens them; see :class:`~rayvec.cluster.places.RayPlaces`.
        rehost: Whether the environments of lost nodes resume elsewhere.
        replay_calls: Names of calls and attributes that they get again there.

    Attributes:
        session: Closed once all nodes are.

    Raises:
        NodeLostError: A node ended meanwhile.
        Exception: What the constructor of an environment raised, its ``__cause__`` an ``EnvError``.
    """

    first_id = 0
    kind = "node"
    has_nodes = True
    children: list[Any]

    def __init__(
        self,
        topology: Topology,
        places: Any,
        *,
        rehost: bool = False,
        replay_calls: Sequence[str] = (),
    ) -> None:
        self._places, self._slices = places, list(topology.nodes)
        self._rehost, self.session = rehost, ExitStack()
        starting = self._starting(self._slices)
        super().__init__(starting, self._replacement, restarts=RESTARTS_OF_A_NODE, replay_calls=replay_calls)

    def _starting(self, places: Sequence[NodeSlice]) -> Iterator[Any]:
        """Yields nodes, and then starts them: the driver's own comes last, so that others start meanwhile."""
        nodes = []
        for place in places:
            nodes.append(self._places.open(place))
            yield nodes[-1]
        for node in sorted(nodes, key=is_here):
            node.start()

    def allocate(self, observation: Space[Any], action: Space[Any]) -> None:
        """Allocates the arrays of the driver and of all nodes for these spaces."""
        self.layout, self.action_layout = ArrayLayout.of(observation), ArrayLayout.of_actions(action)
        self.open(own_arrays(self.layout, self.num_envs), observation, action)

    def post(self, command: Command) -> Ticket:
        """Starts a command. Before a reset or a chunk, environments may move to other nodes."""
        if command.op in STEPPING:
            for k, place in self._places.moves(self._slices, command.op == Op.STEP).items():
                if not self._pending[k] or self._places.leaves(self._slices[k]):
                    self._move(k, place)
        return super().post(command)

    def _move(self, k: int, place: NodeSlice) -> None:
        """Moves the environments of node k, once it has answered. If they can't start there, they stay."""
        old, before = self.children[k], self._slices[k]
        while self._pending[k]:
            self._receive(k, _POLL_S)
        states = self._states_of(k)
        if self._slices[k] is not before:  # it was lost meanwhile
            return
        envs = f"environments {self.bounds[k]} to {self.bounds[k + 1] - 1}"
        try:
            (node,), _ = started(self._starting([place]))
        except Exception as error:
            self._places.distrust(place)
            logger.warning("%s can't move to node %s: %s", envs, place.name, error)
            return
        leaves = " (it leaves)" if self._places.leaves(before) else ""
        logger.warning("%s moved from node %s%s to node %s", envs, before.name, leaves, place.name)
        self._slices[k] = place
        self.resume(k, node, states)
        old.close(CLOSE_S)
        old.join(CLOSE_S)

    def _states_of(self, k: int) -> list[Any] | None:
        """Returns the states of the environments of node k; None if one of them offers none, or raises."""
        ticket = super().post(Command(Op.GET_STATE, np.array(self.parts[k])))
        self.wait(ticket)
        answer = self.take(ticket)
        self.notes = [*answer.notes]
        if (failure := answer.failure) is not None:
            logger.warning("the episodes of %s are cut: %s: %s", failure.where, failure.type_name, failure.text)
        return None if answer.value is None or any(state is None for state in answer.value) else answer.value

    def _replacement(self, k: int, lost: ChildLost) -> Any:
        """Starts a node in place of one that is lost.

        Raises:
            NodeLostError: Lost nodes are not replaced, or there is no place.
            ChildLost: This one was lost while it started.
        """
        if not self._rehost:
            raise lost.error
        place = self._slices[k] = self._places.another(k, self._slices, lost.error)
        note = self.notes[-1]
        self.notes[-1] = note._replace(text=f"{note.text} They resume on node {place.name}.")
        try:
            return started(self._starting([place]))[0][0]
        except (NodeLostError, WorkerLostError) as error:
            raise ChildLost(error) from error

    @property
    def topology(self) -> Topology:
        """Which node holds which environments. Of elastic nodes, each part has a slice of its own."""
        units = self.spaces.unit_bounds
        if units is None:
            return Topology(tuple(self._slices))
        return Topology(
            tuple(replace(each, worker_bounds=tuple(units[list(each.worker_bounds)].tolist())) for each in self._slices)
        )

    @property
    def transports(self) -> tuple[str, ...]:
        """How each slice of the topology is reached: ``"shm"`` or ``"tcp"``."""
        return tuple(node.transport for node in self.children)

    def pids(self) -> dict[str, list[int]]:
        """Returns process ids by the name of the node: of the owner of its workers, and of these."""
        found: dict[str, list[int]] = {}
        for place, node in zip(self._slices, self.children, strict=True):
            owner, *workers = node.worker_pids()
            found.setdefault(place.name, [owner]).extend(workers)
        return found

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the environments and ends the nodes. What runs after `timeout_s` (10 s) is killed."""
        with self.session:
            super().close(timeout_s)
