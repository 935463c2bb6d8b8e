"""Where environments run while nodes join and leave the cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rayvec.cluster.nodes import FreeNode, choose_nodes, leaving_nodes, look_until
from rayvec.cluster.placement import assign_parts, num_parts
from rayvec.cluster.ray_places import DISTRUST_S, REPLACE_S, RayPlaces
from rayvec.cluster.ray_session import check_head, unreachable
from rayvec.data import NodeSlice, Topology
from rayvec.data.topology import even_bounds
from rayvec.errors import ConfigError, NodeLostError, check_node_range, counted

__all__ = ["ElasticPlaces"]

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class ElasticPlaces(RayPlaces):
    """Places parts of the environments on the nodes that are there, each part as a node of its own.

    The arguments are those of :class:`~rayvec.cluster.ray_places.RayPlaces`; `num_nodes` of the demand is a pair.

    Raises:
        ConfigError: The range is not valid, or there are fewer environments than nodes.
    """

    is_elastic = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        demand = self.demand
        self._low, self._high = check_node_range(demand.num_nodes)
        if self._high > demand.num_envs:
            raise ConfigError(
                f"num_nodes={tuple(demand.num_nodes)} was passed with {demand.num_envs} environments. Each node holds "
                f"at least one: let max be at most {demand.num_envs}, or make more environments."
            )
        self._wait_s = self.env_rules.start_timeout_s
        self._bounds = even_bounds(demand.num_envs, num_parts(self._high, demand.num_envs))
        self._part_size = self._bounds[1]
        self._rooms: dict[str, int] = {}  # of each node that holds parts, when it got the first of them
        self._next_poll_s = {True: 0.0, False: 0.0}
        self._leaving: Collection[str] = ()

    def plan(self, *, takes_busy: bool) -> Topology:
        """Places all parts on the nodes that are there.

        Raises:
            ConfigError: There are too few.
        """
        nodes = self._usable((), least=0 if takes_busy and self.demand.takes_what_is_free else 1)
        if not self._are_enough(nodes):
            raise self.demand.too_much_for(self.free_nodes())
        node_of = assign_parts([None] * (len(self._bounds) - 1), self._weights(nodes))
        return Topology(tuple(self._places(dict(enumerate(node_of)), nodes).values()))

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool) -> dict[int, NodeSlice]:
        """Returns which parts move now, and where to. It reads the nodes once a second.

        Nothing moves while there are too few nodes, a node that holds parts is lost, or the head does not answer.
        """
        now = time.monotonic()
        if now < self._next_poll_s[leaving_only]:
            return {}
        self._next_poll_s[leaving_only] = now + _POLL_S
        holders = {each.node_id for each in slices}
        try:
            nodes = self._usable(holders)
        except NodeLostError as error:
            self._next_poll_s = dict.fromkeys((True, False), now + DISTRUST_S)
            logger.warning("no environments move for %g s: %s", DISTRUST_S, error)
            return {}
        if not self._are_enough(nodes) or not holders <= {node.node_id for node in nodes} | {*self._leaving}:
            return {}
        node_of = assign_parts([each.node_id for each in slices], self._weights(nodes))
        moving = {
            k: node
            for k, (each, node) in enumerate(zip(slices, node_of, strict=True))
            if node != each.node_id and (self.leaves(each) or not leaving_only) and node not in self.distrusted()
        }
        return self._places(moving, nodes)

    def leaves(self, place: NodeSlice) -> bool:
        """Whether a node has announced that it leaves."""
        return place.node_id in self._leaving

    def another(self, k: int, slices: Sequence[NodeSlice], error: Exception) -> NodeSlice:
        """Returns where the environments of a lost node resume; waits at most 8 s until there are enough nodes."""
        check_head(error)
        self.distrust(slices[k])
        current = [None if i == k or at.node_id in self.distrusted() else at.node_id for i, at in enumerate(slices)]
        holders = [node_id for node_id in current if node_id is not None]
        nodes = look_until(partial(self._usable, holders), self._are_enough, REPLACE_S)
        if not self._are_enough(nodes):  # only the actor may have died
            self._distrusted.clear()
            nodes = self._usable(holders)
        if not self._are_enough(nodes):
            raise NodeLostError(
                f"{counted(len(nodes), 'node')} of at least {self._low} for num_nodes=({self._low}, {self._high}) "
                f"remain after a loss ({error}). Start more nodes, or lower min."
            ) from error
        return self._places({k: assign_parts(current, self._weights(nodes))[k]}, nodes)[k]

    def _usable(self, holders: Collection[str], least: int = 1) -> list[FreeNode]:
        """Reads from Ray the nodes that may hold parts: those that do, then those that answer and have room."""
        distrusted = self.distrusted()
        self._leaving = leaving_nodes()
        self._rooms = {node_id: room for node_id, room in self._rooms.items() if node_id in holders}
        may_hold = [
            node
            for node in self.free_nodes()
            if node.node_id in holders or (node.node_id not in distrusted and self._room(node) >= least)
        ]
        nodes = choose_nodes(may_hold, holders, self._leaving, self._high)
        silent = unreachable({node.node_id: node.raylet for node in nodes if node.node_id not in holders})
        self._distrusted.update(dict.fromkeys(silent, time.monotonic() + DISTRUST_S))
        return [node for node in nodes if node.node_id not in silent]

    def _room(self, node: FreeNode) -> int:
        """Returns how many workers a node has room for, with resources how many parts."""
        room = self.demand.room(node)
        return room if self.demand.resources is None else room // self._part_size

    def _are_enough(self, nodes: Sequence[FreeNode]) -> bool:
        if len(nodes) < self._low or self.demand.resources is None:
            return len(nodes) >= self._low
        return sum(self._rooms.get(node.node_id, self._room(node)) for node in nodes) >= len(self._bounds) - 1

    def _weights(self, nodes: Sequence[FreeNode]) -> dict[str, int]:
        """Returns the room of each node when it got its first part."""
        for node in nodes:
            self._rooms.setdefault(node.node_id, max(1, self._room(node)))
        return {node.node_id: self._rooms[node.node_id] for node in nodes}

    def _places(self, node_of: Mapping[int, str], nodes: Sequence[FreeNode]) -> dict[int, NodeSlice]:
        """Returns the place of each part, with its workers and the free cores that it claims."""
        left = {node.node_id: node for node in nodes}
        parts_per_node = -(-(len(self._bounds) - 1) // self._high)
        places = {}
        for part, node_id in node_of.items():
            cores = -(-self._rooms[node_id] // parts_per_node)
            places[part] = self.demand.place(left[node_id], range(*self._bounds[part : part + 2]), cores)
            free = {**left[node_id].free, "CPU": left[node_id].cpus - places[part].num_cpus}
            left[node_id] = replace(left[node_id], free=free)
        return places
