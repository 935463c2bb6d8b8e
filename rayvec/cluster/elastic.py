"""Elastic nodes: which node holds each part of the environments while nodes join and leave the cluster."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rayvec.cluster.placement import FreeNode, choose_nodes, free_nodes, leaving_nodes, look_until
from rayvec.cluster.ray_places import DISTRUST_S, Demand, RayPlaces
from rayvec.cluster.reachability import check_head, unreachable
from rayvec.data import NodeSlice, Topology
from rayvec.data.partition import even_bounds
from rayvec.errors import ConfigError, NodeLostError, check_node_range, counted

__all__ = ["ElasticPlaces", "assign_parts", "num_parts", "shares"]

_POLL_S = 1.0
_REPLACE_S = 8.0
_MAX_PARTS_PER_NODE = 3
_MAX_UNEVEN = 1.25

logger = logging.getLogger(__name__)


def num_parts(low: int, high: int, num_envs: int) -> int:
    """Returns into how many parts environments are divided that `low` to `high` nodes hold.

    It is the smallest multiple of `high`, up to three times, with which the fullest node has at most 1.25 times its
    fair share, however many nodes there are.

    >>> [num_parts(1, high, num_envs=64) for high in (1, 2, 3, 4, 8)]
    [1, 2, 6, 8, 24]
    """

    def unevenness(parts: int) -> float:
        return max(math.ceil(parts / nodes) * nodes / parts for nodes in range(low, high + 1))

    choices = [high * times for times in range(1, _MAX_PARTS_PER_NODE + 1)]
    best = next((parts for parts in choices if unevenness(parts) <= _MAX_UNEVEN), choices[-1])
    return min(best, num_envs)


def shares(weights: Sequence[int], count: int, held: Sequence[int]) -> list[int]:
    """Divides `count` parts in proportion to weights.

    Of nodes with equal remainders, the one with the most parts beyond its share, rounded down, gets one more. So
    dividing again changes nothing.

    Args:
        weights: Weight of each node.
        count: Number of parts.
        held: Number of parts that each node has.

    >>> shares([4, 4, 4], 8, held=[4, 4, 0])
    [3, 3, 2]
    >>> shares([1, 3], 2, held=[0, 0]), shares([1, 3], 2, held=[1, 1])
    ([1, 1], [1, 1])
    """
    total = sum(weights)
    counts = [count * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda k: (-(count * weights[k] % total), counts[k] - held[k]))
    for k in by_remainder[: count - sum(counts)]:
        counts[k] += 1
    return counts


def assign_parts(current: Sequence[str | None], weights: Mapping[str, int]) -> list[str]:
    """Assigns each part to a node in proportion to the nodes' weights, with as few moves as possible.

    Args:
        current: The node that holds each part; None, or a node without a weight, for a part that must move.
        weights: Weight of each node that may hold parts, in order of preference.

    >>> assign_parts([None] * 4, {"a": 2, "b": 2})
    ['a', 'a', 'b', 'b']
    >>> assign_parts(["a"] * 3 + ["b"] * 3, {"a": 2, "b": 2, "c": 2})
    ['a', 'a', 'c', 'c', 'b', 'b']
    >>> assign_parts(["a", "a", "c", "c", "b", "b"], {"a": 2, "b": 2})
    ['a', 'a', 'a', 'b', 'b', 'b']
    """
    held = {node: [part for part, holder in enumerate(current) if holder == node] for node in weights}
    counts = shares(list(weights.values()), len(current), [len(parts) for parts in held.values()])
    room = dict(zip(weights, counts, strict=True))
    found: dict[int, str] = {}
    num_givers = 0
    for node, parts in sorted(held.items(), key=lambda item: item[1]):
        surplus = max(0, len(parts) - room[node])
        from_end = num_givers % 2 == 0  # the second one gives its first parts, which adjoin the last ones of the first
        kept = parts[: len(parts) - surplus] if from_end else parts[surplus:]
        num_givers += surplus > 0
        found.update(dict.fromkeys(kept, node))
        room[node] -= len(kept)
    for part in range(len(current)):
        if part not in found:
            adjoining = [found[near] for near in (part - 1, part + 1) if near in found and room[found[near]]]
            node = adjoining[0] if adjoining else max(room, key=room.__getitem__)
            found[part] = node
            room[node] -= 1
    return [found[part] for part in range(len(current))]


class ElasticPlaces(RayPlaces):
    """Places parts of the environments on the nodes that are there, each part as a node of its own.

    Args:
        demand: What environments ask; its `num_nodes` is a pair.

    Raises:
        ConfigError: The range is not valid, or there are fewer environments than nodes.
    """

    def __init__(self, demand: Demand) -> None:
        super().__init__(replace(demand, num_nodes=None))
        self._low, self._high = check_node_range(demand.num_nodes)
        num_envs = demand.factory.num_envs
        if self._high > num_envs:
            raise ConfigError(
                f"num_nodes={tuple(demand.num_nodes)} was passed with {num_envs} environments. Each node holds at "
                f"least one: let max be at most {num_envs}, or make more environments."
            )
        self._bounds = even_bounds(num_envs, num_parts(self._low, self._high, num_envs))
        self._cores: dict[str, int] = {}  # of each node that holds parts, when it got the first of them
        self._next_poll_s = dict.fromkeys((True, False), 0.0)
        self._alive: set[str] = set()
        self._leaving: Collection[str] = ()

    def num_workers(self) -> int:
        """Returns how many workers there are, if each has a core."""
        return sum(node.cpus for node in free_nodes()[: self._high])

    def topology(self) -> Topology:
        """Places all parts, and waits until there are enough nodes.

        Raises:
            ConfigError: There are too few.
        """
        timeout_s = self._demand.restart_policy.start_timeout_s
        nodes = look_until(partial(self._usable, ()), self._are_enough, timeout_s)
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
        """Returns which parts should move now, and where to. It reads the nodes once a second.

        Nothing moves while there are too few nodes, a node that holds parts is lost, or the head does not answer.
        """
        if time.monotonic() < self._next_poll_s[leaving_only]:
            return {}
        holders = {each.node_id for each in slices}
        try:
            nodes = self._usable(holders)
        except NodeLostError as error:
            self._next_poll_s = dict.fromkeys((True, False), time.monotonic() + DISTRUST_S)
            logger.warning("no environments move for %g s: %s", DISTRUST_S, error)
            return {}
        self._next_poll_s[leaving_only] = time.monotonic() + _POLL_S
        if not self._are_enough(nodes) or not holders <= self._alive:
            return {}
        node_of = assign_parts([each.node_id for each in slices], self._weights(nodes))
        moving = {
            k: node
            for k, (each, node) in enumerate(zip(slices, node_of, strict=True))
            if node != each.node_id and (self.leaves(each) or not leaving_only) and node not in self.distrusted()
        }
        return self._places(moving, nodes)

    def leaves(self, place: NodeSlice) -> bool:
        """Whether a node has announced that it leaves."""
        return place.node_id in self._leaving

    def another(self, k: int, slices: Sequence[NodeSlice], error: Exception) -> NodeSlice:
        """Returns where the environments of a lost node resume; waits at most 8 s until there are enough nodes."""
        check_head(error)
        self.distrust(slices[k])
        current = [None if i == k or at.node_id in self.distrusted() else at.node_id for i, at in enumerate(slices)]
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

    def _usable(self, holders: Collection[str]) -> list[FreeNode]:
        """Reads from Ray the nodes that may hold parts: those that do, then those that answer and have free cores."""
        demand, distrusted = self._demand, self.distrusted()
        listed, wanted = free_nodes(claimed_too=not demand.claim_cpus), demand.workers_per_node or 1
        self._leaving, self._alive = leaving_nodes(), {node.node_id for node in listed}
        self._cores = {node_id: cores for node_id, cores in self._cores.items() if node_id in holders}
        may_hold = [
            node
            for node in listed
            if node.node_id in holders or (node.node_id not in distrusted and node.cpus >= min(wanted, node.total_cpus))
        ]
        nodes = choose_nodes(may_hold, holders, self._leaving, self._high)
        silent = unreachable({node.node_id: node.raylet for node in nodes if node.node_id not in holders})
        self._distrusted.update(dict.fromkeys(silent, time.monotonic() + DISTRUST_S))
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
