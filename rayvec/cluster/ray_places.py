"""Nodes on Ray: where they are, and the actors that serve all of them but the driver's own, whose cores are claimed."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayvec.cluster.node import Node, NodeSpec
from rayvec.cluster.node_facts import check_versions, own_versions, restore_variables
from rayvec.cluster.placement import (
    FreeNode,
    assign_parts,
    choose_nodes,
    free_nodes,
    leaving_nodes,
    look_until,
    num_parts,
    plan_topology,
    reserved_bundles,
)
from rayvec.cluster.ray_session import can_call_ray, check_connected, check_head, put, unreachable
from rayvec.cluster.remote import NodeServer, RemoteNode
from rayvec.cluster.stream import Stream, accept, connect
from rayvec.data import NodeSlice, Topology
from rayvec.data.topology import even_bounds
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, NodeLostError, check_count, check_node_range, counted, first_line
from rayvec.fleet.commands import ChildLost
from rayvec.fleet.restarts import RestartPolicy

__all__ = ["CoreClaim", "Demand", "ElasticPlaces", "NodeActor", "RayPlaces"]

logger = logging.getLogger(__name__)

_PLACE_S = 10.0
_START_S = 30.0
"""How long Ray may take to start the actor of a node, on a machine that is busy."""
_FREED_S = 1.0
_REPLACE_S = 8.0
_POLL_S = 1.0
_DISTRUST_S = 30.0
"""How long a node that was lost gets no environments: Ray lists a node that is gone for about a minute."""


class CoreClaim:
    """Cores that Ray gives to nothing else until they are released, or until this process ends.

    In a driver, a placement group holds them, which needs no process: Ray removes it with the driver's job. Within a
    task or an actor, such as a trial of Ray Tune, the job outlives the process. There an actor holds them, which ends
    with the process that made it.

    Args:
        node_id: The node, by Ray's id.
        num_cpus: Number of cores.
    """

    def __init__(self, node_id: str, num_cpus: float) -> None:
        self._is_in_job = ray.get_runtime_context().worker.mode == ray.WORKER_MODE
        if self._is_in_job:
            affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._claim: Any = ray.remote(_Holder).options(num_cpus=num_cpus, scheduling_strategy=affinity).remote()
        else:
            self._claim = placement_group([{"CPU": num_cpus}], bundle_label_selector=[{"ray.io/node-id": node_id}])

    def wait(self, timeout_s: float) -> bool:
        """Waits until Ray has reserved the cores. Returns False if they did not become free in time.

        Raises:
            RayError: The actor could not start.
        """
        if not self._is_in_job:
            return bool(self._claim.wait(timeout_s))
        try:
            ray.get(self._claim.__ray_ready__.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return False
        return True

    def release(self) -> None:
        """Makes the cores free again."""
        if can_call_ray():
            ray.kill(self._claim) if self._is_in_job else remove_placement_group(self._claim)


class _Holder:
    """Holds cores as long as it lives."""


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
        kind: Any = ray.remote(max_restarts=0, max_task_retries=0)(NodeActor)
        self._actor = kind.options(num_cpus=num_cpus, scheduling_strategy=strategy).remote()
        self._listening = self._actor.listen.remote(place.address, self._key)

    def connect(self) -> Stream:
        """Waits until the actor runs, and connects to it."""
        where = self._place.address
        try:
            versions, port = ray.get(self._listening, timeout=_START_S)
            check_versions(versions, self._place.name)
            where += f":{port}, which a firewall may block"
            return connect(self._place.address, port, self._key)
        except (ray.exceptions.RayError, OSError) as error:
            raise OSError(f"no connection to {where} ({type(error).__name__}: {first_line(error)})") from error

    def kept(self, number: int) -> Any:
        """Returns a reference to a chunk that stays there."""
        return self._actor.kept.remote(number)

    def kill(self) -> None:
        """Ends the actor."""
        if can_call_ray():  # without its head, Ray would wait for a minute
            ray.kill(self._actor)


class Demand(NamedTuple):
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
    """Opens nodes on Ray, and finds other places for the environments of those that are lost.

    Args:
        demand: What environments ask.
    """

    def __init__(self, demand: Demand) -> None:
        for name, least in (("num_nodes", 0), ("workers_per_node", 1)):
            value = getattr(demand, name)
            if value is not None and not isinstance(value, tuple | list):
                check_count(name, value, least)  # num_nodes=0 does not come here, but is allowed
        self._demand, self._distrusted = demand, dict[str, float]()

    def _free_nodes(self) -> list[FreeNode]:
        return free_nodes(claimed_too=not self._demand.claim_cpus)

    def topology(self) -> Topology:
        """Returns where all environments begin. It waits for cores: Ray frees those of closed ones with a delay.

        Raises:
            ConfigError: The cluster does not have the nodes or cores.
        """
        demand = self._demand

        def plan() -> Topology | ConfigError:
            sizes = demand.num_nodes, demand.workers_per_node
            try:
                return plan_topology(self._free_nodes(), demand.factory.num_envs, *sizes, **demand.sizes)
            except ConfigError as error:
                return error

        def are_free(nodes: list[FreeNode]) -> bool:
            return sum(node.cpus > 0 for node in nodes) >= (demand.num_nodes or len(nodes))

        look_until(self._free_nodes, are_free, _FREED_S)
        found = look_until(plan, lambda found: isinstance(found, Topology), _PLACE_S)
        if isinstance(found, ConfigError):
            raise found
        return found if demand.claim_cpus else found.without_claims()

    def open(self, place: NodeSlice) -> Node | RemoteNode:
        """Returns a node, which begins to start."""
        demand, (first, *_, stop) = self._demand, place.worker_bounds
        parts, limits = demand.factory.in_parts(place.worker_bounds), demand.restart_policy
        spec = NodeSpec(parts, stop - first, demand.factory.seed, place.name, demand.preload, limits, first)
        here = ray.get_runtime_context().get_node_id()
        if place.node_id != here:
            return RemoteNode(_Process(place), spec)
        keep = partial(put, what=f"the chunk of node {place.name}")
        if not place.num_cpus or here in reserved_bundles()[1]:
            return Node(spec, keep)
        claim = CoreClaim(here, place.num_cpus)

        def await_cores() -> None:
            if not claim.wait(_PLACE_S):
                cores = f"{place.num_cpus:g} free cores for {_PLACE_S:g} s"
                raise ChildLost(NodeLostError(f"node {place.name} has had no {cores}."))

        return Node(spec, keep, await_cores, claim.release)

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool) -> dict[int, NodeSlice]:
        """Returns which nodes' environments move now, and where to; with `leaving_only`, from nodes that leave."""
        return {}

    def leaves(self, place: NodeSlice) -> bool:
        """Whether a node has announced that it leaves; it is asked of those whose environments move."""
        return False

    def another(self, k: int, slices: Sequence[NodeSlice], error: Exception) -> NodeSlice:
        """Returns where the environments of node k resume, which is lost: on the node with the most free cores.

        It waits at most 8 s for a node to return or for cores to become free.

        Args:
            k: Index of the lost node.
            slices: The places of all nodes.
            error: The error that reported the loss.

        Raises:
            NodeLostError: No other node has a free core; `error` is its cause. Or the head of the cluster is gone.
        """
        check_head(error)
        lost = slices[k]
        self.distrust(lost)

        def look() -> list[FreeNode]:
            listed = free_nodes(claimed_too=lost.num_cpus == 0)
            nodes = [node for node in listed if node.node_id not in self._distrusted_now() and node.cpus >= 1]
            silent = unreachable({node.node_id: node.raylet for node in nodes})
            return [node for node in nodes if node.node_id not in silent]

        nodes = look_until(look, bool, _REPLACE_S)
        if not nodes:
            raise NodeLostError(f"{error} No other node has a free core for its environments.") from error
        node = max(nodes, key=lambda node: node.cpus)
        bounds, cpus = lost.worker_bounds, min(lost.num_cpus, node.cpus)
        if lost.num_workers == lost.num_cpus:  # one worker for each core; else one for each environment
            bounds = even_bounds(len(lost.env_range), int(cpus), lost.env_range.start)
        return NodeSlice(node.node_id, node.address, bounds, cpus)

    def distrust(self, place: NodeSlice) -> None:
        """Gives a node no environments for a while. This one runs: only its cores were missing."""
        if place.node_id != ray.get_runtime_context().get_node_id():
            self._distrusted[place.node_id] = time.monotonic() + _DISTRUST_S

    def _distrusted_now(self) -> list[str]:
        return [node_id for node_id, until_s in self._distrusted.items() if until_s > time.monotonic()]


class ElasticPlaces(RayPlaces):
    """Places parts of the environments on the nodes that are there, each part as a node of its own.

    Args:
        demand: What environments ask; its `num_nodes` is a pair.

    Raises:
        ConfigError: The range is not valid, or there are fewer environments than nodes.
    """

    def __init__(self, demand: Demand) -> None:
        super().__init__(demand)
        self._low, self._high = check_node_range(demand.num_nodes)
        num_envs = demand.factory.num_envs
        if self._high > num_envs:
            raise ConfigError(
                f"num_nodes={tuple(demand.num_nodes)} was passed with {num_envs} environments. Each node holds at "
                f"least one: let max be at most {num_envs}, or make more environments."
            )
        self._bounds = even_bounds(num_envs, num_parts(self._high, num_envs))
        self._cores: dict[str, int] = {}  # of each node that holds parts, when it got the first of them
        self._next_poll_s = {True: 0.0, False: 0.0}
        self._leaving: Collection[str] = ()

    def topology(self) -> Topology:
        """Places all parts, and waits until there are enough nodes.

        Raises:
            ConfigError: There are too few.
        """
        timeout_s, wanted = self._demand.restart_policy.start_timeout_s, self._demand.workers_per_node
        nodes = look_until(partial(self._usable, ()), self._are_enough, _FREED_S if wanted is None else timeout_s)
        if wanted is None and not self._are_enough(nodes):  # by default, nodes without a free core are better than none
            nodes = look_until(partial(self._usable, (), least=0), self._are_enough, timeout_s)
        if not self._are_enough(nodes):
            there = ", ".join(f"{node.address}: {node.cpus} free" for node in free_nodes()) or "none with cores"
            cores = counted(self._demand.workers_per_node or 1, "free core")
            raise ConfigError(
                f"There were not {counted(self._low, 'node')} with {cores} each, within start_timeout_s={timeout_s:g}: "
                f"{there}. Start more nodes, lower min of num_nodes=(min, max), or raise start_timeout_s."
            )
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
            self._next_poll_s = dict.fromkeys((True, False), now + _DISTRUST_S)
            logger.warning("no environments move for %g s: %s", _DISTRUST_S, error)
            return {}
        if not self._are_enough(nodes) or not holders <= {node.node_id for node in nodes} | {*self._leaving}:
            return {}
        node_of = assign_parts([each.node_id for each in slices], self._weights(nodes))
        moving = {
            k: node
            for k, (each, node) in enumerate(zip(slices, node_of, strict=True))
            if node != each.node_id and (self.leaves(each) or not leaving_only) and node not in self._distrusted_now()
        }
        return self._places(moving, nodes)

    def leaves(self, place: NodeSlice) -> bool:
        """Whether a node has announced that it leaves."""
        return place.node_id in self._leaving

    def another(self, k: int, slices: Sequence[NodeSlice], error: Exception) -> NodeSlice:
        """Returns where the environments of a lost node resume; waits at most 8 s until there are enough nodes."""
        check_head(error)
        self.distrust(slices[k])
        current = [
            None if i == k or at.node_id in self._distrusted_now() else at.node_id for i, at in enumerate(slices)
        ]
        holders = [node_id for node_id in current if node_id is not None]
        nodes = look_until(partial(self._usable, holders), self._are_enough, _REPLACE_S)
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
        """Reads from Ray the nodes that may hold parts: those that do, then those that answer and have free cores."""
        distrusted, wanted = self._distrusted_now(), self._demand.workers_per_node or least
        self._leaving = leaving_nodes()
        self._cores = {node_id: cores for node_id, cores in self._cores.items() if node_id in holders}
        may_hold = [
            node
            for node in self._free_nodes()
            if node.node_id in holders or (node.node_id not in distrusted and node.cpus >= min(wanted, node.total_cpus))
        ]
        nodes = choose_nodes(may_hold, holders, self._leaving, self._high)
        silent = unreachable({node.node_id: node.raylet for node in nodes if node.node_id not in holders})
        self._distrusted.update(dict.fromkeys(silent, time.monotonic() + _DISTRUST_S))
        return [node for node in nodes if node.node_id not in silent]

    def _are_enough(self, nodes: Sequence[FreeNode]) -> bool:
        return len(nodes) >= self._low

    def _weights(self, nodes: Sequence[FreeNode]) -> dict[str, int]:
        """Returns the cores that the workers of each node use."""
        for node in nodes:
            self._cores.setdefault(node.node_id, self._demand.workers_per_node or max(1, node.cpus))
        return {node.node_id: self._cores[node.node_id] for node in nodes}

    def _places(self, node_of: Mapping[int, str], nodes: Sequence[FreeNode]) -> dict[int, NodeSlice]:
        """Returns the place of each part, with its workers and the free cores that it claims."""
        addresses = {node.node_id: node.address for node in nodes}
        sizes, free = self._demand.sizes, {node.node_id: float(node.cpus) * self._demand.claim_cpus for node in nodes}
        parts_per_node = -(-(len(self._bounds) - 1) // self._high)
        places = {}
        for part, node_id in node_of.items():
            first, stop = self._bounds[part : part + 2]
            cores = -(-self._cores[node_id] // parts_per_node)
            most = sizes.get("max_workers", stop - first) if sizes.get("worker_per_env") else cores
            bounds = even_bounds(stop - first, min(stop - first, most), first)
            num_cpus = max(0.0, min(cores, sizes.get("cores_per_worker", 1.0) * (len(bounds) - 1), free[node_id]))
            free[node_id] -= num_cpus
            places[part] = NodeSlice(node_id, addresses[node_id], bounds, num_cpus)
        return places
