"""Where the environments of a cluster run: where they begin, move as nodes join and leave, and resume after a loss."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from rayvec.cluster.node import Node
from rayvec.cluster.nodes import Claim, FreeNode, choose_nodes, free_nodes, leaving_nodes, look_until, reserved_bundles
from rayvec.cluster.placement import Demand, assign_parts, num_parts, plan_topology
from rayvec.cluster.ray_session import check_connected
from rayvec.cluster.remote import RemoteNode
from rayvec.data import NodeSlice, Topology
from rayvec.data.topology import even_bounds
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, NodeLostError, check_count, check_node_range
from rayvec.fleet.restarts import EnvRules
from rayvec.node.machine import MachineSpec

_REQUEST_S = 8.0
_FREED_S = 1.0
"""How long it waits for free cores before busy nodes count: Ray frees those of closed environments with a delay."""
_REPLACE_S = 8.0
_DISTRUST_S = 30.0
"""How long a node that was lost gets no environments."""
_LOOK_S = 1.0


class RayPlaces:
    """Opens nodes on Ray, and finds other places for the environments of those that are lost.

    Args:
        factory: Makes all environments.
        preload: Modules that the workers of a node import once.
        env_rules: What happens to environments that raise, hang or have run for long, and their limits.
        demand: What environments ask of the cluster.
    """

    _leaving = frozenset[str]()
    _missing = "No other node has a free core, or what else they need, for its environments."

    def __init__(self, factory: EnvFactory, preload: Sequence[str], env_rules: EnvRules, demand: Demand) -> None:
        for name, least in (("num_nodes", 0), ("workers_per_node", 1)):
            value = getattr(demand, name)
            if value is not None and not isinstance(value, tuple | list):
                check_count(name, value, least)  # num_nodes=0 does not come here, but is allowed
        self.factory, self.preload, self.env_rules = factory, tuple(preload), env_rules
        self.demand, self._distrusted = demand, dict[str, float]()
        self._wait_s = min(_REQUEST_S, env_rules.start_timeout_s)

    def free_nodes(self) -> list[FreeNode]:
        """Reads from Ray the nodes that may have environments: those with cores, if these need nothing else."""
        by_cores = self.demand.resources is None
        nodes = free_nodes(claimed_too=by_cores and not self.demand.claim_cpus)
        return [node for node in nodes if node.all_cpus or not by_cores]

    def topology(self) -> Topology:
        """Returns where all environments begin. It waits until the cluster has what `demand` says.

        Meanwhile a placement group requests it: an autoscaler sees that, and starts nodes.

        Raises:
            ConfigError: The cluster does not have the nodes, cores or resources.
        """
        found = self._found()
        if found is None:
            group = placement_group(*self.demand.request())
            try:
                look_until(self.plan, lambda plan: plan or group.wait(0.1), self._wait_s)
            finally:
                remove_placement_group(group)
            found = self._found()
        if found is None:
            raise self.demand.too_much_for(self.free_nodes())
        return found

    def _found(self) -> Topology | None:
        """Returns a plan with free cores, if there are some soon, else one with what is there."""
        return look_until(partial(self.plan, takes_busy=False), bool, _FREED_S) or self.plan()

    def plan(self, *, takes_busy: bool = True) -> Topology | None:
        """Returns where all environments would begin now; the arguments are those of :func:`plan_topology`."""
        return plan_topology(self.free_nodes(), self.demand, takes_busy=takes_busy)

    def open(self, place: NodeSlice) -> Node | RemoteNode:
        """Returns a node, which begins to start."""
        (first, *_, stop), factory, resources = place.worker_bounds, self.factory, self.demand.resources
        parts = factory.in_parts(place.worker_bounds)
        spec = MachineSpec(parts, first, factory.seed, place.name, self.preload, self.env_rules, resources)
        amounts: Mapping[str, float] = {"CPU": place.num_cpus} if place.num_cpus else {}
        if resources is not None:
            amounts = resources.claim(stop - first)
        here = ray.get_runtime_context().get_node_id()
        if place.node_id != here:
            return RemoteNode(place, amounts, spec)
        is_reserved = here in reserved_bundles()[1] and "GPU" not in amounts
        return Node(spec, claim=Claim(place, amounts) if amounts and not is_reserved else None)

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool) -> dict[int, NodeSlice]:
        """Returns which environments move now, and where to. With a fixed number of nodes, none do."""
        return {}

    def leaves(self, place: NodeSlice) -> bool:
        """Whether a node has announced that it leaves. With a fixed number of nodes, these are not read."""
        return place.node_id in self._leaving

    def another(self, k: int, slices: Sequence[NodeSlice], error: Exception) -> NodeSlice:
        """Returns where the environments of node k resume, which is lost. It waits at most 8 s until there is room.

        Args:
            k: Index of the lost node.
            slices: The places of all nodes.
            error: The error that reported the loss.

        Raises:
            NodeLostError: There is no room; `error` is its cause.
        """
        check_connected(error)
        self.distrust(slices[k])
        place = look_until(partial(self._elsewhere, k, slices), bool, _REPLACE_S)
        if place is None:
            raise NodeLostError(f"{error} {self._missing}") from error
        return place

    def _elsewhere(self, k: int, slices: Sequence[NodeSlice]) -> NodeSlice | None:
        """Returns the node with the most free cores as the place of the environments of a lost one."""
        lost, resources, num_envs = slices[k], self.demand.resources, len(slices[k].env_range)

        def has_room(node: FreeNode) -> bool:
            return node.cpus >= 1 if resources is None else resources.fitting(node.free, num_envs) == num_envs

        listed = free_nodes(claimed_too=resources is None and lost.num_cpus == 0)
        nodes = [node for node in listed if node.node_id not in self.distrusted() and has_room(node)]
        if not nodes:
            return None
        node = max(nodes, key=lambda node: node.cpus)
        place = self.demand.place(node, lost.env_range, min(lost.num_workers, max(1, int(node.cpus))))
        return place if lost.num_cpus else replace(place, num_cpus=0)

    def distrust(self, place: NodeSlice) -> None:
        """Gives a node no environments for a while. This one runs: only its cores were missing."""
        if place.node_id != ray.get_runtime_context().get_node_id():
            self._distrusted[place.node_id] = time.monotonic() + _DISTRUST_S

    def distrusted(self) -> list[str]:
        """Returns the ids of the nodes that get no environments now."""
        return [node_id for node_id, until_s in self._distrusted.items() if until_s > time.monotonic()]


class ElasticPlaces(RayPlaces):
    """Places parts of the environments on the nodes that are there, each part as a node of its own.

    The arguments are those of :class:`RayPlaces`; `num_nodes` of the demand is a pair.

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
            f"Fewer nodes than min remain for num_nodes=({self._low}, {self._high}), or they have too little of what "
            "the environments need. Start more, or lower min."
        )
        self._wait_s = self.env_rules.start_timeout_s
        self._bounds = even_bounds(demand.num_envs, num_parts(self._high, demand.num_envs))
        self._rooms: dict[str, int] = {}  # of each node, when it got its first part
        self._silent = frozenset[str]()
        self._next_look_s = {True: 0.0, False: 0.0}

    def plan(self, *, takes_busy: bool = True) -> Topology | None:
        """Places all parts on the nodes that are there, if these are enough."""
        least = 0 if takes_busy and self.demand.takes_what_is_free else 1
        places = self._assigned([None] * (len(self._bounds) - 1), least)
        return None if places is None else Topology(tuple(places.values()))

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool) -> dict[int, NodeSlice]:
        """Returns which parts move now, and where to. It reads the nodes once a second, for either `leaving_only`.

        Nothing moves while there are too few nodes, or a node that holds parts does not answer.
        """
        if time.monotonic() < self._next_look_s[leaving_only]:
            return {}
        wanted = self._assigned([each.node_id for each in slices])
        self._next_look_s[leaving_only] = time.monotonic() + _LOOK_S
        if wanted is None or self._silent:
            return {}
        due = {k: place for k, place in wanted.items() if self.leaves(slices[k]) or not leaving_only}
        return {k: place for k, place in due.items() if place.node_id not in self.distrusted()}

    def _elsewhere(self, k: int, slices: Sequence[NodeSlice]) -> NodeSlice | None:
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
