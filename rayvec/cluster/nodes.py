"""The nodes of the connected cluster: what is free on them, and what is claimed there for environments."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayvec.cluster.ray_session import check_connected
from rayvec.data import NodeSlice
from rayvec.errors import NodeLostError
from rayvec.fleet.commands import ChildLost

_LOOK_AGAIN_S = 0.25
_ANSWER_S = 2.0
_ANSWER_AGAIN_S = 0.1
"""How long a node gets to answer that did not the last time: Ray may list it for a minute, and each poll asks it."""
_MAX_THREADS = 64
_CLAIM_S = 10.0
_T = TypeVar("_T")
_NodeT = TypeVar("_NodeT", bound=Any)
_silent = set[str]()


@dataclass(frozen=True, slots=True)
class FreeNode:
    """A node and what is free on it.

    Attributes:
        node_id: Ray's node id, in hexadecimal.
        address: The node's own IP address.
        free: What is free, by Ray's names of resources.
        total: What there is.
    """

    node_id: str
    address: str
    free: Mapping[str, float]
    total: Mapping[str, float]

    @property
    def cpus(self) -> float:
        """Number of free cores."""
        return round(float(self.free.get("CPU", 0)), 4)  # Ray counts in 1/10,000

    @property
    def all_cpus(self) -> int:
        """Number of whole cores, whether they are free or not."""
        return int(self.total.get("CPU", 0))


def reserved_bundles() -> tuple[Any, dict[str, list[tuple[int, dict[str, float]]]]]:
    """Returns this process's placement group, and its bundles but the first by node: the index and amounts of each.

    A trial of Ray Tune, for example, runs in the first bundle and has the others reserved for its workers.
    """
    group = ray.util.get_current_placement_group()
    bundles: dict[str, list[tuple[int, dict[str, float]]]] = {}
    if group is not None and group.bundle_count > 1:
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        for index, bundle in list(enumerate(group.bundle_specs))[1:]:
            bundles.setdefault(nodes[index], []).append((index, bundle))
    return group, bundles


def unreachable(addresses: Mapping[str, tuple[str, int]]) -> set[str]:
    """Returns the ids of the nodes that do not accept a connection within 2 s, or 0.1 s if they did not before."""
    timeouts_s = [_ANSWER_AGAIN_S if node_id in _silent else _ANSWER_S for node_id in addresses]
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        accepted = threads.map(_accepts, addresses.values(), timeouts_s)
        found = {node_id for node_id, accepts in zip(addresses, accepted, strict=True) if not accepts}
    _silent.clear()
    _silent.update(found)
    return found


def _accepts(address: tuple[str, int], timeout_s: float) -> bool:
    try:
        socket.create_connection(address, timeout_s).close()
    except OSError:
        return False
    return True


def free_nodes(*, claimed_too: bool = False) -> list[FreeNode]:
    """Returns the connected cluster's nodes. The driver's own node comes first.

    Ray itself notices after up to a minute that a node is gone. The operating system of a node accepts a connection to
    the port of its raylet, however busy the node is: nodes that do not are left out, which takes up to 2 s. In a
    placement group with bundles for workers, only the bundles' cores count.

    Args:
        claimed_too: Whether to count what is already claimed in Ray, for pools that claim nothing.

    Raises:
        NodeLostError: Ray is not initialised.
    """
    from ray._private.state import available_resources_per_node

    check_connected()
    here = ray.get_runtime_context().get_node_id()
    available, bundles = available_resources_per_node(), reserved_bundles()[1]
    listed = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    gone = unreachable({name: (node["NodeManagerAddress"], node["NodeManagerPort"]) for name, node in listed.items()})
    nodes = []
    for node in (listed[name] for name in listed.keys() - gone):
        node_id, address, total = node["NodeID"], node["NodeManagerAddress"], node["Resources"]
        free = total if claimed_too else available.get(node_id, {})
        if bundles:
            reserved = Counter[str]({"CPU": 0})
            for _, amounts in bundles.get(node_id, ()):
                reserved.update(amounts)
            free, total = free | reserved, total | reserved
        nodes.append(FreeNode(node_id, address, free, total))
    return sorted(nodes, key=lambda node: (node.node_id != here, node.node_id))


def leaving_nodes() -> frozenset[str]:
    """Returns the ids of the nodes that Ray drains: they announced that they leave. The driver's own is not among them.

    What runs on a draining node continues, but nothing new is placed there.
    """
    from ray._private.state import state

    return frozenset(state.get_draining_nodes()) - {ray.get_runtime_context().get_node_id()}


def choose_nodes(nodes: Sequence[_NodeT], used: Collection[str], leaving: Collection[str], most: int) -> list[_NodeT]:
    """Returns the nodes that a run uses while nodes join and leave the cluster.

    Args:
        nodes: The nodes that are suited, each with its `node_id`.
        used: Ids of the nodes that the run uses now. They come first.
        leaving: Ids of the nodes that announced that they leave. They are left out.
        most: The greatest number of nodes.
    """
    staying = [node for node in nodes if node.node_id not in leaving]
    return sorted(staying, key=lambda node: node.node_id not in used)[:most]


def look_until(look: Callable[[], _T], is_enough: Callable[[_T], Any], timeout_s: float) -> _T:
    """Repeats `look` until it finds enough or the timeout expires. Returns what it found last."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if is_enough(found) or time.monotonic() >= deadline:
            return found
        time.sleep(_LOOK_AGAIN_S)


class ClaimActor:
    """An actor that holds what is claimed for environments, as long as it lives."""

    def gpus(self) -> list[str]:
        """Returns the GPUs that Ray has given to this actor."""
        ids: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return ids


def start_actor(kind: type[ClaimActor], place: NodeSlice, amounts: Mapping[str, float]) -> Any:
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
    actor: Any = ray.remote(max_restarts=0, max_task_retries=0)(kind)
    claims = actor.options(num_cpus=num_cpus, num_gpus=num_gpus, resources=custom, scheduling_strategy=strategy)
    return claims.remote()


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
        self._actor = start_actor(ClaimActor, place, amounts) if is_in_job or "GPU" in amounts else None
        self._group: Any = None
        if self._actor is None:
            self._group = placement_group([dict(amounts)], bundle_label_selector=[{"ray.io/node-id": place.node_id}])

    def wait(self) -> list[str]:
        """Waits until Ray has reserved it. Returns the GPUs.

        Raises:
            ChildLost: It did not become free in time.
        """
        with suppress(ray.exceptions.GetTimeoutError):
            if self._actor is not None:
                return list(ray.get(self._actor.gpus.remote(), timeout=_CLAIM_S))
            if self._group.wait(_CLAIM_S):
                return []
        raise ChildLost(NodeLostError(f"node {self._name} has not had {self._amounts} free for {_CLAIM_S:g} s."))

    def release(self) -> None:
        """Makes it free again."""
        if ray.is_initialized():
            remove_placement_group(self._group) if self._actor is None else ray.kill(self._actor)
