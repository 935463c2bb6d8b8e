"""Where environments run while nodes join and leave the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayvec.cluster.nodes import FreeNode, choose_nodes, leaving_nodes
from rayvec.cluster.placement import assign_parts, num_parts
from rayvec.cluster.ray_places import RayPlaces
from rayvec.data import NodeSlice, Topology
from rayvec.data.topology import even_bounds
from rayvec.errors import ConfigError, check_node_range

__all__ = ["ElasticPlaces"]

_POLL_S = 1.0


class ElasticPlaces(RayPlaces):
    """Places parts of the environments on the nodes that are there, each part as a node of its own.

    The arguments are those of :class:`~rayvec.cluster.ray_places.RayPlaces`; `num_nodes` of the demand is a pair.

    Raises:
        ConfigError: The range is not valid, or there are fewer environments than nodes.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        demand = self.demand
        self._low, self._high = check_node_range(demand.num_nodes)
        if self._high > demand.num_envs:
            raise ConfigError(
                f"num_nodes={tuple(demand.num_nodes)} was passed with {demand.num_envs} environments. Each node holds "
                f"at least one: let max be at most {demand.num_envs}, or make more environments."
            )
        self._missing = (
            f"Fewer nodes than min remain for num_nodes=({self._low}, {self._high}). Start more, or lower min."
        )
        self._wait_s = self.env_rules.start_timeout_s
        self._bounds = even_bounds(demand.num_envs, num_parts(self._high, demand.num_envs))
        self._rooms: dict[str, int] = {}  # of each node, when it got its first part
        self._silent = self._leaving = frozenset[str]()
        self._wanted: dict[int, NodeSlice] = {}
        self._next_poll_s = 0.0

    def plan(self, *, takes_busy: bool) -> Topology:
        """Places all parts on the nodes that are there.

        Raises:
            ConfigError: There are too few.
        """
        least = 0 if takes_busy and self.demand.takes_what_is_free else 1
        places = self._assigned([None] * (len(self._bounds) - 1), least)
        if places is None:
            raise self.demand.too_much_for(self.free_nodes())
        return Topology(tuple(places.values()))

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool) -> dict[int, NodeSlice]:
        """Returns which parts move now, and where to. It reads the nodes once a second.

        Nothing moves while there are too few nodes, or a node that holds parts does not answer.
        """
        if time.monotonic() >= self._next_poll_s:
            wanted = self._assigned([each.node_id for each in slices])
            self._wanted = {} if wanted is None or self._silent else wanted
            self._next_poll_s = time.monotonic() + _POLL_S
        due = [k for k in self._wanted if self.leaves(slices[k]) or not leaving_only]
        places = {k: self._wanted.pop(k) for k in due}
        return {k: place for k, place in places.items() if place.node_id not in self.distrusted()}

    def leaves(self, place: NodeSlice) -> bool:
        """Whether a node has announced that it leaves."""
        return place.node_id in self._leaving

    def _elsewhere(self, k: int, slices: Sequence[NodeSlice]) -> NodeSlice | None:
        self._wanted = {}
        distrusted = self.distrusted()
        current = [None if i == k or at.node_id in distrusted else at.node_id for i, at in enumerate(slices)]
        places = self._assigned(current)
        return None if places is None else places[k]

    def _assigned(self, current: Sequence[str | None], least: int = 1) -> dict[int, NodeSlice] | None:
        """Reads from Ray which nodes may hold parts: those that do, and others that have room and are trusted.

        Args:
            current: The node that holds each part, None for none.
            least: The least room of another node.

        Returns:
            The new place of each part that moves; None where there are too few nodes.
        """
        nodes, distrusted, holders = self.free_nodes(), self.distrusted(), frozenset(filter(None, current))
        rooms = {node.node_id: self._room(node) for node in nodes}
        self._silent, self._leaving = holders - rooms.keys(), leaving_nodes()
        self._rooms = self._rooms | rooms | {holder: self._rooms[holder] for holder in holders}
        fit = [node for node in nodes if node.node_id in holders or rooms[node.node_id] >= least]
        trusted = [node for node in fit if node.node_id not in distrusted]
        if len(trusted) < self._low:  # only the actor of a node may have died
            trusted = fit
        nodes = choose_nodes(trusted, holders, self._leaving, self._high)
        weights = {node.node_id: max(1, self._rooms[node.node_id]) for node in nodes}
        has_too_little = self.demand.resources is not None and sum(weights.values()) < len(current)
        if len(nodes) < self._low or has_too_little:
            return None
        found = enumerate(zip(current, assign_parts(current, weights), strict=True))
        return self._places({part: new for part, (old, new) in found if new != old}, nodes)

    def _room(self, node: FreeNode) -> int:
        """Returns how many workers a node has room for, with resources how many parts."""
        room = self.demand.room(node)
        return room if self.demand.resources is None else room // self._bounds[1]

    def _places(self, node_of: Mapping[int, str], nodes: Sequence[FreeNode]) -> dict[int, NodeSlice]:
        """Returns the place of each part, with its workers and the free cores that it claims."""
        left = {node.node_id: node for node in nodes}
        parts_per_node = -(-(len(self._bounds) - 1) // self._high)
        places = {}
        for part, node_id in node_of.items():
            node, cores = left[node_id], max(1, -(-self._rooms[node_id] // parts_per_node))
            places[part] = self.demand.place(node, range(*self._bounds[part : part + 2]), cores)
            left[node_id] = replace(node, free={**node.free, "CPU": node.cpus - places[part].num_cpus})
        return places
