"""Assigns environments to the free cores of a cluster; the result is a :class:`~rayvec.data.Topology`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import ray

from rayvec.cluster.ray_session import Address, check_head
from rayvec.data import NodeSlice, Topology
from rayvec.data.topology import even_bounds
from rayvec.errors import ConfigError, counted

__all__ = [
    "FreeNode",
    "assign_parts",
    "choose_nodes",
    "free_nodes",
    "leaving_nodes",
    "look_until",
    "num_parts",
    "plan_topology",
    "reserved_bundles",
]

_LOOK_AGAIN_S = 0.25
_T = TypeVar("_T")
_NodeT = TypeVar("_NodeT", bound=Any)


@dataclass(frozen=True, slots=True)
class FreeNode:
    """A node and its free cores.

    Attributes:
        node_id: Ray's node id, in hexadecimal.
        address: The node's own IP address.
        cpus: Number of free whole cores.
        all_cpus: Number of whole cores, whether they are free or not.
        gpus: Number of free GPUs.
        raylet: Address and port of its raylet.
    """

    node_id: str
    address: str
    cpus: int
    all_cpus: int = 0
    gpus: float = 0.0
    raylet: Address = ("", 0)

    @property
    def total_cpus(self) -> int:
        """Number of whole cores, at least of the free ones."""
        return max(self.all_cpus, self.cpus)


def reserved_bundles() -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """Returns this process's placement group, and its bundles but the first by node: the index and cores of each.

    A trial of Ray Tune, for example, runs in the first bundle and has the others reserved for its workers.
    """
    group = ray.util.get_current_placement_group()
    bundles: dict[str, list[tuple[int, float]]] = {}
    if group is not None and group.bundle_count > 1:
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        for index, bundle in list(enumerate(group.bundle_specs))[1:]:
            bundles.setdefault(nodes[index], []).append((index, bundle.get("CPU", 0.0)))
    return group, bundles


def free_nodes(*, claimed_too: bool = False) -> list[FreeNode]:
    """Returns the connected cluster's live nodes that have cores. The driver's own node comes first.

    In a placement group with bundles for workers, these are the nodes of the bundles, and their cores.

    Args:
        claimed_too: Whether to count cores that are already claimed in Ray, for pools that claim no cores.

    Raises:
        NodeLostError: The head of the cluster does not answer.
    """
    from ray._private.state import available_resources_per_node

    check_head()  # without it, Ray would wait for it without end
    here = ray.get_runtime_context().get_node_id()
    free, bundles = available_resources_per_node(), reserved_bundles()[1]
    nodes = []
    for node in (node for node in ray.nodes() if node["Alive"]):
        all_cpus = int(node["Resources"].get("CPU", 0))
        if bundles:
            reserved = int(sum(cpus for _, cpus in bundles.get(node["NodeID"], ())))
            free.setdefault(node["NodeID"], {})["CPU"] = all_cpus = reserved
        if all_cpus:
            left, address = free.get(node["NodeID"], {}), node["NodeManagerAddress"]
            cpus = all_cpus if claimed_too else int(left.get("CPU", 0))
            raylet = address, node["NodeManagerPort"]
            nodes.append(FreeNode(node["NodeID"], address, cpus, all_cpus, left.get("GPU", 0.0), raylet))
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


def plan_topology(
    nodes: Sequence[FreeNode],
    num_envs: int,
    num_nodes: int | None = None,
    workers_per_node: int | None = None,
    *,
    worker_per_env: bool = False,
    max_workers: int | None = None,
    cores_per_worker: float = 1.0,
) -> Topology:
    """Divides environments among nodes in proportion to their workers or cores, and on each node evenly.

    A node claims one core for each worker of `workers_per_node`, or all its cores where it has fewer. By default it
    claims what is free, and nothing where no core is free.

    Args:
        nodes: Available nodes, in order of preference.
        num_envs: How many environments.
        num_nodes: How many nodes to use; by default all that have a free core, or all where none has.
        workers_per_node: Workers on each node; by default one for each free core. There are never more workers
            than environments.
        worker_per_env: Whether each environment gets a worker of its own, even if there are fewer cores.
        max_workers: The most workers of a node with `worker_per_env`.
        cores_per_worker: Cores that each worker claims.

    Raises:
        ConfigError: The cluster does not have the requested nodes or cores.

    >>> node = FreeNode("a", "10.0.0.1", 4)
    >>> plan_topology([node], num_envs=7, workers_per_node=3).nodes[0].worker_bounds
    (0, 3, 5, 7)
    """
    wanted = workers_per_node or 1
    usable = [node for node in nodes if node.cpus >= max(1, min(wanted, node.total_cpus))]
    if workers_per_node is None and (num_nodes or not usable):
        usable += [node for node in nodes if node not in usable]
    count = min(num_nodes or max(1, len(usable)), num_envs)
    if len(usable) < count:
        raise _too_few_nodes(nodes, count, workers_per_node)
    chosen = usable[:count]
    are_all_busy = not any(node.cpus for node in chosen)
    weights = [workers_per_node or node.cpus or (node.total_cpus if are_all_busy else 1) for node in chosen]
    while sum(weights) > num_envs:  # every worker has an environment
        weights[weights.index(max(weights))] -= 1
    ends = np.cumsum([0, *weights])
    if worker_per_env:
        shares = np.round(ends / ends[-1] * num_envs).astype(int).tolist()
        most = max_workers or num_envs
        bounds = [even_bounds(stop - first, max(1, min(stop - first, most)), first) for first, stop in pairwise(shares)]
    else:
        every = even_bounds(num_envs, sum(weights))
        bounds = [every[first : last + 1] for first, last in pairwise(ends.tolist())]
    slices = []
    for node, worker_bounds, weight in zip(chosen, bounds, weights, strict=True):
        claimed = min(node.cpus, weight, cores_per_worker * (len(worker_bounds) - 1))
        slices.append(NodeSlice(node.node_id, node.address, worker_bounds, round(claimed, 4)))
    return Topology(tuple(each for each in slices if each.env_range))


def _too_few_nodes(nodes: Sequence[FreeNode], count: int, workers_per_node: int | None) -> ConfigError:
    there = ", ".join(f"{node.address}: {node.cpus} of {node.total_cpus} cores free" for node in nodes)
    wanted = f"num_nodes={count}" if workers_per_node is None else f"workers_per_node={workers_per_node}"
    claimed = "" if workers_per_node is None else f" claims {counted(workers_per_node, 'core')} of a node, and"
    return ConfigError(
        f"{wanted}{claimed} needs {counted(count, 'node')}, but Ray has {there or 'no living node with cores'}. Leave "
        "it out to use what is free, free the cores (is another pool still open?), or pass num_nodes=0, which steps on "
        "this machine without Ray."
    )


def num_parts(high: int, num_envs: int) -> int:
    """Returns into how many parts environments are divided that up to `high` nodes hold.

    There are two for each node if there are more than two nodes, so that fewer nodes can hold nearly equal numbers.

    >>> [num_parts(high, num_envs=64) for high in (1, 2, 3, 4, 8)]
    [1, 2, 6, 8, 16]
    """
    return min(high if high <= 2 else 2 * high, num_envs)


def assign_parts(current: Sequence[str | None], weights: Mapping[str, int]) -> list[str]:
    """Assigns each part to a node in proportion to the nodes' weights. Parts move only from nodes that have too many.

    Args:
        current: The node that holds each part; None, or a node without a weight, for a part that must move.
        weights: Weight of each node that may hold parts, in order of preference.

    >>> assign_parts([None] * 4, {"a": 2, "b": 2})
    ['a', 'a', 'b', 'b']
    >>> assign_parts(["a"] * 3 + ["b"] * 3, {"a": 2, "b": 2, "c": 2})
    ['a', 'a', 'c', 'b', 'b', 'c']
    >>> assign_parts(["a", "a", "c", "b", "b", "c"], {"a": 2, "b": 2})
    ['a', 'a', 'a', 'b', 'b', 'b']
    """
    held = {node: [part for part, holder in enumerate(current) if holder == node] for node in weights}
    exact = {node: len(current) * weight / sum(weights.values()) for node, weight in weights.items()}
    room = {node: int(share) for node, share in exact.items()}
    # of nodes with equal remainders, one that has more parts than room gets one more: so that they stay
    by_remainder = sorted(weights, key=lambda node: (room[node] - exact[node], room[node] - len(held[node])))
    for node in by_remainder[: len(current) - sum(room.values())]:
        room[node] += 1
    found = {part: node for node, parts in held.items() for part in parts[: room[node]]}
    left = iter([node for node in weights for _ in range(room[node] - len(held[node]))])
    return [found[part] if part in found else next(left) for part in range(len(current))]
