"""Nodes on Ray: an actor serves each of them, but the driver's own, whose cores are claimed."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayvec.cluster.cluster import NodeChild
from rayvec.cluster.core_claim import CoreClaim
from rayvec.cluster.node_server import NodeServer, NodeSpec
from rayvec.cluster.node_variables import restore_variables
from rayvec.cluster.own_node import OwnNode
from rayvec.cluster.placement import place_again, reserved_bundles
from rayvec.cluster.reachability import can_call_ray, check_connected, put
from rayvec.cluster.remote import RemoteNode
from rayvec.cluster.software_versions import check_versions, own_versions
from rayvec.cluster.stream import Stream, accept, connect
from rayvec.data import NodeSlice
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError, first_line
from rayvec.fleet.commands import ChildLost
from rayvec.fleet.restarts import RestartPolicy
from rayvec.node.machine import Machine

__all__ = ["NodeActor", "RayPlaces"]

_PLACE_S = 10.0
_DISTRUST_S = 30.0
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
            versions, port = ray.get(self._listening, timeout=_PLACE_S)
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


class RayPlaces:
    """Opens nodes on Ray.

    Args:
        factory: Makes all environments.
        preload: Modules that the workers of a node import once.
        restart_policy: Whether environments that raise, and workers that die or hang, are replaced.
    """

    def __init__(self, factory: EnvFactory, preload: Sequence[str], restart_policy: RestartPolicy) -> None:
        self._factory, self._preload, self._restart_policy = factory, tuple(preload), restart_policy
        self._distrusted: dict[str, float] = {}

    def open(self, places: Sequence[NodeSlice]) -> list[NodeChild]:
        """Starts nodes: their actors at the same time."""
        here = ray.get_runtime_context().get_node_id()
        starting = [CoreClaim(here, place.num_cpus) if place.node_id == here else _Process(place) for place in places]
        nodes: list[NodeChild] = []
        try:
            for place, each in reversed(list(zip(places, starting, strict=True))):  # the own one comes last
                nodes.insert(0, self._far(place, each) if isinstance(each, _Process) else self._own(place, each))
        except BaseException:
            for unused in [*starting[: len(starting) - len(nodes)], *nodes]:
                with suppress(Exception):
                    unused.release() if isinstance(unused, CoreClaim) else unused.kill()
            raise
        return nodes

    def _far(self, place: NodeSlice, process: _Process) -> RemoteNode:
        first, stop = place.worker_bounds[0], place.worker_bounds[-1]
        parts, seed = self._factory.in_parts(place.worker_bounds), self._factory.seed
        spec = NodeSpec(parts, stop - first, seed, place.name, self._preload, self._restart_policy, first)
        return RemoteNode(process, spec)

    def _own(self, place: NodeSlice, claim: CoreClaim) -> OwnNode:
        name = f"node {place.name}"
        if not claim.wait(_PLACE_S):
            raise ChildLost(NodeLostError(f"{name} has had no {place.num_cpus:g} free cores for {_PLACE_S:g} s."))
        first, stop = place.worker_bounds[0], place.worker_bounds[-1]
        machine = Machine(
            replace(self._factory, env_fns=self._factory.env_fns[first:stop]),
            place.num_workers,
            node=place.name,
            preload=self._preload,
            restart_policy=self._restart_policy,
            first_id=first,
        )
        return OwnNode(machine, name, claim.release, partial(put, what=f"a chunk of {name}"))

    def another(self, place: NodeSlice, error: Exception) -> NodeSlice:
        """Returns where the environments of a lost node resume: on the node with the most free cores.

        Raises:
            NodeLostError: Nowhere.
        """
        check_connected(error)
        now_s = time.monotonic()
        if place.node_id != ray.get_runtime_context().get_node_id():  # this one runs: only its cores were missing
            self._distrusted[place.node_id] = now_s + _DISTRUST_S
        return place_again(place, [node for node, until_s in self._distrusted.items() if until_s > now_s], error)
