"""The actor of a node, and what is claimed from Ray for a node's environments."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayvec.cluster.node_facts import check_versions, own_versions, restore_variables
from rayvec.cluster.nodes import reserved_bundles
from rayvec.cluster.ray_session import check_connected
from rayvec.cluster.remote import NodeServer
from rayvec.cluster.stream import Stream, accept, connect
from rayvec.data import NodeSlice
from rayvec.errors import NodeLostError, first_line
from rayvec.fleet.commands import ChildLost

__all__ = ["Claim", "NodeActor", "NodeProcess"]

_PLACE_S = 10.0
_START_S = 30.0
"""How long Ray may take to start the actor of a node, on a machine that is busy."""


class NodeActor:
    """The process of a node. A thread serves the driver."""

    def __init__(self) -> None:
        restore_variables("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # environments get those of the node

    def gpus(self) -> list[str]:
        """Returns the GPUs that Ray has given to this actor."""
        ids: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return ids

    def listen(self, address: str, key: bytes) -> tuple[dict[str, str], int]:
        """Begins to serve at this node's own address. Returns the versions of this process, and the port."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        args = listener, key, self.gpus()
        threading.Thread(target=self._serve, args=args, name="rayvec-node", daemon=True).start()
        return own_versions(), port

    def _serve(self, listener: socket.socket, key: bytes, gpus: list[str]) -> None:
        self._server = NodeServer(accept(listener, key), gpus)
        self._server.serve()


def _started(place: NodeSlice, amounts: Mapping[str, float]) -> Any:
    """Starts an actor on a node that claims what its environments need, in a reserved bundle of the node if any."""
    check_connected()
    group, bundles = reserved_bundles()
    strategy: Any = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    custom = dict(amounts)
    if place.node_id in bundles:
        index, bundle = bundles[place.node_id][0]
        custom = {name: min(amount, bundle.get(name, 0)) for name, amount in amounts.items()}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    num_cpus, num_gpus = custom.pop("CPU", 0), custom.pop("GPU", 0)
    kind: Any = ray.remote(max_restarts=0, max_task_retries=0)(NodeActor)
    claims = kind.options(num_cpus=num_cpus, num_gpus=num_gpus, resources=custom, scheduling_strategy=strategy)
    return claims.remote()


class NodeProcess:
    """The process of a node, which begins to start.

    Args:
        place: The node.
        amounts: What is claimed for its environments, by Ray's names.
    """

    def __init__(self, place: NodeSlice, amounts: Mapping[str, float]) -> None:
        self._place, self._key = place, secrets.token_bytes(32)
        self._actor = _started(place, amounts)
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

    def kill(self) -> None:
        """Ends the actor."""
        if ray.is_initialized():
            ray.kill(self._actor)


class Claim:
    """What Ray gives to nothing else until it is released, or until this process ends: for the driver's own node.

    In a driver, a placement group holds it, which needs no process: Ray removes it with the driver's job. Within a
    task or an actor, such as a trial of Ray Tune, the job outlives the process. There an actor holds it, which ends
    with the process that made it. So it does with GPUs, because only an actor knows which ones it has.

    Args:
        place: The node.
        amounts: What is claimed, by Ray's names.
    """

    def __init__(self, place: NodeSlice, amounts: Mapping[str, float]) -> None:
        self._name, self._amounts = place.name, dict(amounts)
        is_in_job = ray.get_runtime_context().worker.mode == ray.WORKER_MODE
        self._actor = _started(place, amounts) if is_in_job or "GPU" in amounts else None
        self._group: Any = None
        if self._actor is None:
            self._group = placement_group([dict(amounts)], bundle_label_selector=[{"ray.io/node-id": place.node_id}])

    def wait(self) -> list[str]:
        """Waits until Ray has reserved it. Returns the GPUs.

        Raises:
            ChildLost: It did not become free in time.
        """
        if self._actor is None and self._group.wait(_PLACE_S):
            return []
        try:
            if self._actor is not None:
                gpus: list[str] = ray.get(self._actor.gpus.remote(), timeout=_PLACE_S)
                return gpus
        except ray.exceptions.GetTimeoutError:
            pass
        raise ChildLost(NodeLostError(f"node {self._name} has not had {self._amounts} free for {_PLACE_S:g} s."))

    def release(self) -> None:
        """Makes it free again."""
        if ray.is_initialized():
            remove_placement_group(self._group) if self._actor is None else ray.kill(self._actor)
