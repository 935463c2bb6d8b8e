"""Where the environments of a cluster run: which nodes they begin on, and which replace those that are lost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from rayvec.cluster.node import Node
from rayvec.cluster.node_actor import Claim, NodeProcess
from rayvec.cluster.nodes import FreeNode, free_nodes, look_until, reserved_bundles
from rayvec.cluster.placement import Demand, plan_topology
from rayvec.cluster.ray_session import check_connected
from rayvec.cluster.remote import RemoteNode
from rayvec.data import NodeSlice, Topology
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, NodeLostError, check_count
from rayvec.fleet.restarts import EnvRules
from rayvec.node.machine import MachineSpec

__all__ = ["RayPlaces"]

_REQUEST_S = 8.0
_FREED_S = 1.0
"""How long it waits for free cores before busy nodes count: Ray frees those of closed environments with a delay."""
_REPLACE_S = 8.0
_DISTRUST_S = 30.0
"""How long a node that was lost gets no environments: Ray lists a node that is gone for about a minute."""


class RayPlaces:
    """Opens nodes on Ray, and finds other places for the environments of those that are lost.

    Args:
        factory: Makes all environments.
        preload: Modules that the workers of a node import once.
        env_rules: What happens to environments that raise, hang or have run for long, and their limits.
        demand: What environments ask of the cluster.
    """

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
                look_until(self._planned, lambda plan: plan or group.wait(0.1), self._wait_s)
            finally:
                remove_placement_group(group)
            found = self._found()
        return found or self.plan(takes_busy=True)  # which raises

    def _found(self) -> Topology | None:
        """Returns a plan with free cores, if there are some soon, else one with what is there."""
        return look_until(partial(self._planned, takes_busy=False), bool, _FREED_S) or self._planned()

    def _planned(self, *, takes_busy: bool = True) -> Topology | None:
        with suppress(ConfigError):
            return self.plan(takes_busy=takes_busy)
        return None

    def plan(self, *, takes_busy: bool) -> Topology:
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
            return RemoteNode(NodeProcess(place, amounts), spec)
        is_reserved = here in reserved_bundles()[1] and "GPU" not in amounts
        return Node(spec, Claim(place, amounts) if amounts and not is_reserved else None)

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool) -> dict[int, NodeSlice]:
        """Returns which environments move now, and where to. With a fixed number of nodes, none do."""
        return {}

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
