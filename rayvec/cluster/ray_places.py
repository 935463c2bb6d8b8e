"""Nodes on Ray: an actor serves each of them, but the driver's own, whose cores are claimed."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayvec.cluster.core_claim import CoreClaim
from rayvec.cluster.node import Node, NodeSpec
from rayvec.cluster.node_server import NodeServer
from rayvec.cluster.node_variables import restore_variables
from rayvec.cluster.placement import (
    free_nodes,
    look_until,
    num_free,
    place_again,
    plan_topology,
    reserved_bundles,
    wait_for_topology,
)
from rayvec.cluster.reachability import can_call_ray, check_connected, put
from rayvec.cluster.remote import RemoteNode
from rayvec.cluster.software_versions import check_versions, own_versions
from rayvec.cluster.stream import Stream, accept, connect
from rayvec.data import NodeSlice, Topology
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError, check_count, first_line
from rayvec.fleet.commands import ChildLost
from rayvec.fleet.restarts import RestartPolicy

__all__ = ["DISTRUST_S", "Demand", "NodeActor", "RayPlaces"]

_PLACE_S = 10.0
_START_S = 30.0
"""How long Ray may take to start the actor of a node, on a machine that is busy."""
_FREED_S = 1.0
DISTRUST_S = 30.0
"""How long a node that was lost gets no environments: Ray lists a node that is gone for about a minute."""


class NodeActor:
    """The process of a node. A thread serves the driver."""

    def __init__(self) -> None:
        restore_variables("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # environments get those of the node

    def listen(self, address: str, key: bytes) -> tuple[dict[str, str], int]:
        """Begins to serve at this node's own address. Returns the versions of this process, and the port."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        threading.Thread(target=self._serve, args=(listener, key), name="rayvec-node", daemon=True).start()
        return own_versions(), port

    def _serve(self, listener: socket.socket, key: bytes) -> None:
        self._server = NodeServer(accept(listener, key))
        self._server.serve()

    def kept(self, number: int) -> Any:
        """Returns a chunk that has stayed here, which Ray keeps from now on."""
        return self._server.kept.pop(number)


class _Process:
    """The actor of a node, which begins to start.

    Args:
        place: The node.
    """

    def __init__(self, place: NodeSlice) -> None:
        check_connected()
        self._place, self._key = place, secrets.token_bytes(32)
        group, bundles = reserved_bundles()
        strategy: Any = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        num_cpus = place.num_cpus
        if place.node_id in bundles:
            index, num_cpus = bundles[place.node_id][0]
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options: Any = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy}
        kind: Any = ray.remote(NodeActor)
        self._actor = kind.options(num_cpus=num_cpus, **options).remote()
        self._listening = self._actor.listen.remote(place.address, self._key)

    def connect(self) -> Stream:
        """Waits until the actor runs, and connects to it."""
        try:
            versions, port = ray.get(self._listening, timeout=_START_S)
        except ray.exceptions.RayError as error:
            raise OSError(f"{type(error).__name__}: {first_line(error)}") from error
        check_versions(versions, self._place.name)
        address = self._place.address
        try:
            return connect(address, port, self._key)
        except OSError as error:
            text = f"no connection to {address}:{port}, which a firewall may block ({type(error).__name__}: {error})"
            raise OSError(text) from error

    def kept(self, number: int) -> Any:
        """Returns a reference to a chunk that stays there."""
        return self._actor.kept.remote(number)

    def kill(self) -> None:
        """Ends the actor."""
        if can_call_ray():  # without its head, Ray would wait for a minute
            ray.kill(self._actor)


@dataclass(slots=True)
class Demand:
    """What environments ask of a cluster.

    Attributes:
        factory: Makes all environments.
        preload: Modules that the workers of a node import once.
        restart_policy: Whether environments that raise, and workers that die or hang, are replaced.
        num_nodes: How many nodes to use; None for all that have free cores. A pair is the least and greatest number.
        workers_per_node: Worker processes on each; None for one for each free core.
        claim_cpus: Whether to claim the workers' cores from Ray.
        sizes: Of workers, as of :func:`~rayvec.cluster.placement.plan_topology`.
    """

    factory: EnvFactory
    preload: tuple[str, ...]
    restart_policy: RestartPolicy
    num_nodes: Any
    workers_per_node: int | None
    claim_cpus: bool
    sizes: dict[str, Any]


class RayPlaces:
    """Opens nodes on Ray.

    Args:
        demand: What environments ask.
    """

    def __init__(self, demand: Demand) -> None:
        for name, least in (("num_nodes", 0), ("workers_per_node", 1)):
            if (value := getattr(demand, name)) is not None:
                check_count(name, value, least)  # num_nodes=0 does not come here, but is allowed
        self._demand, self._distrusted = demand, dict[str, float]()

    def topology(self) -> Topology:
        """Returns where all environments begin. It waits for cores: Ray frees those of closed ones with a delay.

        Raises:
            ConfigError: The cluster does not have the nodes or cores.
        """

        def plan() -> Topology:
            demand = self._demand
            find = partial(free_nodes, claimed_too=not demand.claim_cpus)
            nodes = look_until(find, lambda found: num_free(found) >= (demand.num_nodes or len(found)), _FREED_S)
            num_envs = demand.factory.num_envs
            topology = plan_topology(nodes, num_envs, demand.num_nodes, demand.workers_per_node, **demand.sizes)
            return topology if demand.claim_cpus else topology.without_claims()

        return wait_for_topology(plan)

    def num_workers(self) -> int:
        """Returns how many workers there are, if each has a core."""
        return sum(node.num_workers for node in self.topology().nodes)

    def open(self, place: NodeSlice) -> Node | RemoteNode:
        """Returns a node, which begins to start."""
        demand, (first, *_, stop) = self._demand, place.worker_bounds
        parts = demand.factory.in_parts(place.worker_bounds)
        spec = NodeSpec(
            parts, stop - first, demand.factory.seed, place.name, demand.preload, demand.restart_policy, first
        )
        here = ray.get_runtime_context().get_node_id()
        if place.node_id != here:
            return RemoteNode(_Process(place), spec)
        claim = CoreClaim(here, 0 if here in reserved_bundles()[1] else place.num_cpus)

        def await_cores() -> None:
            if not claim.wait(_PLACE_S):
                raise ChildLost(
                    NodeLostError(f"node {place.name} has had no {place.num_cpus:g} free cores for {_PLACE_S:g} s.")
                )

        return Node(spec, partial(put, what=f"the chunk of node {place.name}"), await_cores, claim.release)

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool) -> dict[int, NodeSlice]:
        """Returns which environments move to another node now: none, where the number of nodes is fixed."""
        return {}

    def leaves(self, place: NodeSlice) -> bool:
        """Whether a node has announced that it leaves; it is asked of those whose environments move."""
        return False

    def another(self, k: int, slices: Sequence[NodeSlice], error: Exception) -> NodeSlice:
        """Returns where the environments of a lost node resume: on the node with the most free cores.

        Raises:
            NodeLostError: Nowhere.
        """
        check_connected(error)
        self.distrust(slices[k])
        return place_again(slices[k], self.distrusted(), error)

    def distrust(self, place: NodeSlice) -> None:
        """Gives a node no environments for a while. This one runs: only its cores were missing."""
        if place.node_id != ray.get_runtime_context().get_node_id():
            self._distrusted[place.node_id] = time.monotonic() + DISTRUST_S

    def distrusted(self) -> list[str]:
        """Returns the ids of the nodes that get no environments now."""
        return [node_id for node_id, until_s in self._distrusted.items() if until_s > time.monotonic()]
