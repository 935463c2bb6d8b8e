"""Assigns environments to the nodes of a cluster that have room for them: from free cores to a topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rayvec.cluster.nodes import FreeNode
from rayvec.data import NodeSlice, Topology
from rayvec.data.resources import EnvResources
from rayvec.data.topology import even_bounds
from rayvec.errors import ConfigError, counted


@dataclass(frozen=True, slots=True)
class Demand:
    """How many environments there are, and what they need of the nodes of a cluster.

    Attributes:
        num_envs: How many environments, or native sub-batches.
        num_nodes: How many nodes to use; None for all that have free cores, or all where none has. A pair is the least
            and the greatest number.
        workers_per_node: Workers on each, never more than environments; None for one for each free core, or with
            `resources` for each environment.
        worker_per_env: Whether each environment gets a worker of its own, even if there are fewer cores.
        max_workers: The most workers of a node with `worker_per_env`.
        cores_per_worker: Cores that each worker claims, at most 1.
        claim_cpus: Whether to claim the workers' cores from Ray.
        resources: What each environment claims, in place of cores for workers.
    """

    num_envs: int
    num_nodes: Any = None
    workers_per_node: int | None = None
    worker_per_env: bool = False
    max_workers: int | None = None
    cores_per_worker: float = 1.0
    claim_cpus: bool = True
    resources: EnvResources | None = None

    @property
    def takes_what_is_free(self) -> bool:
        """Whether a node without a free core may be used: nothing says how many there must be."""
        return self.workers_per_node is None and self.resources is None

    @property
    def least_nodes(self) -> Any:
        """The least number of nodes; None where it is not set."""
        return self.num_nodes[0] if isinstance(self.num_nodes, tuple | list) else self.num_nodes

    def request(self) -> tuple[list[dict[str, float]], str]:
        """Returns the bundles of a placement group that asks for all of it, and its strategy."""
        count = self.least_nodes or 1
        if self.resources is None:
            return [{"CPU": float(self.workers_per_node or 1)}] * count, "STRICT_SPREAD"
        if self.least_nodes is None:
            return [self.resources.claim(1)] * self.num_envs, "PACK"
        return [self.resources.claim(-(-self.num_envs // count))] * count, "STRICT_SPREAD"

    def too_much_for(self, nodes: Sequence[FreeNode]) -> ConfigError:
        """Returns the error of a cluster that does not have all of it."""
        count = counted(self.least_nodes or 1, "node")
        amounts, where = {"CPU": float(self.workers_per_node or 1)}, f" on each of {count}, or all its cores"
        if self.resources is not None:
            amounts, where = self.resources.claim(self.num_envs), f" on {count}" if self.least_nodes else " together"
        needed = ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
        there = [
            f"{node.address}: {node.free.get(name, 0):g} free of {node.total.get(name, 0):g} {name}"
            for node in nodes
            for name in amounts
        ]
        return ConfigError(
            f"{counted(self.num_envs, 'environment')} need {needed}{where}, but Ray has "
            f"{', '.join(there) or 'no living node with cores'}. Close other environments, start more nodes, or lower "
            "num_nodes or workers_per_node. num_nodes=0 uses this machine without Ray."
        )

    def free_cores(self, node: FreeNode) -> float:
        """Returns the free cores of a node, 0 if they are too few for one worker."""
        return node.cpus if node.cpus >= self.cores_per_worker else 0.0

    def room(self, node: FreeNode) -> int:
        """Returns how many workers a node has room for, with `resources` how many environments."""
        if self.resources is not None:
            return self.resources.fitting(node.free, self.num_envs)
        wanted = self.workers_per_node
        if wanted is None:
            return int(max(1.0, node.cpus)) if self.free_cores(node) else 0
        return wanted if node.cpus >= max(1, min(wanted, node.all_cpus)) else 0

    def place(self, node: FreeNode, envs: range, cores: int) -> NodeSlice:
        """Places environments on a node.

        Args:
            node: The node.
            envs: Their global indices.
            cores: How many workers they may have, if these are not one for each environment.
        """
        is_each = self.worker_per_env or (self.resources is not None and self.workers_per_node is None)
        most = (self.max_workers or len(envs)) if is_each else min(cores, self.workers_per_node or cores)
        bounds = even_bounds(len(envs), max(1, min(len(envs), most)), envs.start)
        if self.resources is not None:
            return NodeSlice(node.node_id, node.address, bounds, self.resources.claim(len(envs)).get("CPU", 0))
        claimed = max(0.0, min(self.free_cores(node), cores, self.cores_per_worker * (len(bounds) - 1)))
        return NodeSlice(node.node_id, node.address, bounds, round(claimed, 4) if self.claim_cpus else 0)


def plan_topology(nodes: Sequence[FreeNode], demand: Demand, *, takes_busy: bool = True) -> Topology | None:
    """Divides environments among nodes in proportion to their room, and on each node evenly.

    A node claims one core for each worker of `workers_per_node`, or all its cores where it has fewer. By default it
    claims what is free, and nothing where no core is free. With `resources`, it claims them for each environment.

    Args:
        nodes: Available nodes, in order of preference.
        demand: What the environments need.
        takes_busy: Whether nodes without a free core may be used by default, and left out where others have some.

    Returns:
        None where they lack the requested nodes, cores or resources.

    >>> node = FreeNode("a", "10.0.0.1", {"CPU": 4}, {"CPU": 4})
    >>> plan_topology([node], Demand(num_envs=7, workers_per_node=3)).nodes[0].worker_bounds
    (0, 3, 5, 7)
    """
    num_envs, num_nodes = demand.num_envs, demand.num_nodes
    rooms = {node.node_id: demand.room(node) for node in nodes}
    chosen = [node for node in nodes if rooms[node.node_id]]
    if takes_busy and demand.takes_what_is_free and (num_nodes or not chosen):
        chosen += [node for node in nodes if node not in chosen]
    if demand.resources is not None and num_nodes:
        chosen.sort(key=lambda node: -rooms[node.node_id])
    wanted = chosen if takes_busy or demand.resources is not None else nodes
    count = min(num_nodes or max(1, len(wanted)), num_envs)
    chosen = chosen[:count]
    are_all_busy = not any(rooms[node.node_id] for node in chosen)
    weights = [rooms[node.node_id] or (node.all_cpus if are_all_busy else 1) for node in chosen]
    if len(chosen) < count or (demand.resources is not None and sum(weights) < num_envs):
        return None
    while sum(weights) > num_envs:  # every worker has an environment
        weights[weights.index(max(weights))] -= 1
    ends = np.cumsum([0, *weights])
    bounds = (-(-ends * num_envs // ends[-1])).tolist()
    slices = [
        demand.place(node, range(*envs), cores)
        for node, envs, cores in zip(chosen, pairwise(bounds), weights, strict=True)
        if envs[0] < envs[1]
    ]
    return Topology(tuple(slices))


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
