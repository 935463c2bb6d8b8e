"""Elastic placement: which node holds each part of the environments while nodes join and leave the cluster.

The environments are divided into parts once, and parts move between nodes as a whole. So the number of parts, their
environments and their order never change.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import ray

from rayvec.cluster.placement import FreeNode, choose_nodes, free_nodes, look_until
from rayvec.cluster.reachability import Address, check_head, head_answers, unreachable
from rayvec.data import NodeSlice, Topology
from rayvec.data.partition import even_bounds
from rayvec.errors import ConfigError, NodeLostError, check_count, check_node_range, counted

__all__ = ["ElasticPlacement", "Move", "assign_parts", "leaving_nodes", "num_parts", "shares"]

_LOOK_S = 1.0
"""The interval at which the cluster's nodes are read, in seconds. It takes 1 ms."""
_REPLACE_S = 8.0
_DISTRUST_S = 30.0
"""How many seconds a node gets no environments after it lost some, could not start some, or gave no answer."""
_MOST_PARTS_PER_NODE = 3
_MOST_UNEVEN = 1.25

logger = logging.getLogger(__name__)


class Move(NamedTuple):
    """A part of the environments that is to move.

    Attributes:
        number: Index of the part.
        place: Where it goes.
        is_leaving: Whether the node that it leaves announced that it will be gone.
    """

    number: int
    place: NodeSlice
    is_leaving: bool


def num_parts(low: int, high: int, num_envs: int) -> int:
    """Returns into how many parts environments are divided that `low` to `high` nodes hold.

    It is the smallest multiple of `high`, up to three times, with which the fullest node has at most 1.25 times its
    fair share, however many nodes there are.

    >>> [num_parts(1, high, num_envs=64) for high in (1, 2, 3, 4, 8)]
    [1, 2, 6, 8, 24]
    """

    def unevenness(parts: int) -> float:
        return max(math.ceil(parts / nodes) * nodes / parts for nodes in range(low, high + 1))

    choices = [high * times for times in range(1, _MOST_PARTS_PER_NODE + 1)]
    best = next((parts for parts in choices if unevenness(parts) <= _MOST_UNEVEN), choices[-1])
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


def leaving_nodes() -> frozenset[str]:
    """Returns the ids of the nodes that Ray drains: they announced that they leave. The driver's own is not among them.

    What runs on a draining node continues, but nothing new is placed there.
    """
    from ray._private.state import state

    return frozenset(state.get_draining_nodes()) - {ray.get_runtime_context().get_node_id()}


def _is_barred(until: Mapping[str, float], node_id: str) -> bool:
    """Whether the time of a node in `until`, a ``time.monotonic`` time, has not passed."""
    return until.get(node_id, 0.0) > time.monotonic()


class ElasticPlacement:
    """Decides which node holds each part of the environments, and reads from Ray which nodes there are.

    Args:
        num_nodes: The least and the greatest number of nodes to use.
        num_envs: Number of environments, or of native sub-batches.
        workers_per_node: Workers on each of `num_nodes[1]` nodes; by default one for each core.
        worker_per_env: Whether each environment has a worker of its own.
        claim_cpus: Whether the workers' cores are claimed from Ray.
        max_workers: The most workers of a part with `worker_per_env`.
        cores_per_worker: Cores that each worker claims.

    Attributes:
        bounds: Bounds of the parts, as indices of environments or native sub-batches.

    Raises:
        ConfigError: The range or the number of workers is not valid, or there are fewer environments than nodes.
    """

    def __init__(
        self,
        num_nodes: tuple[int, int],
        num_envs: int,
        workers_per_node: int | None = None,
        *,
        worker_per_env: bool = False,
        claim_cpus: bool = True,
        max_workers: int | None = None,
        cores_per_worker: float = 1.0,
    ) -> None:
        self._low, self._high = check_node_range(num_nodes)
        if workers_per_node is not None:
            check_count("workers_per_node", workers_per_node)
        if self._high > num_envs:
            raise ConfigError(
                "Each node holds at least one environment.",
                expected=f"num_nodes=(min, max) with max at most {num_envs}, the number of environments",
                got=f"num_nodes={tuple(num_nodes)}",
                remedy="Lower max, or make more environments.",
            )
        count = num_parts(self._low, self._high, num_envs)
        self.bounds = even_bounds(num_envs, count)
        self._parts_per_node = -(-count // self._high)
        self._workers_per_node = workers_per_node
        self._worker_per_env = worker_per_env
        self._claim_cpus = claim_cpus
        self._max_workers = max_workers or num_envs
        self._cores_per_worker = cores_per_worker
        self._cores: dict[str, int] = {}  # of each node that holds parts, when it got the first of them
        self._distrusted: dict[str, float] = {}  # until when a node gets no parts
        self._failed_starts: dict[str, float] = {}  # until when no part moves there
        self._next_look_s = {True: 0.0, False: 0.0}  # for nodes that leave only, and for all
        self._leaving: frozenset[str] = frozenset()
        self._raylets: dict[str, Address] = {}  # of the nodes that Ray takes for alive

    def is_due(self, leaving_only: bool) -> bool:
        """Whether the last call of :meth:`moves` with this argument was a second ago."""
        return time.monotonic() >= self._next_look_s[leaving_only]

    def first_topology(self, timeout_s: float) -> Topology:
        """Places all parts on the nodes that are there, and waits until there are enough of them.

        Raises:
            ConfigError: There are too few nodes when the timeout expires.
        """
        nodes = self._usable([])
        if not self._are_enough(nodes):
            logger.warning("waiting up to %g s for %d nodes; %d are there", timeout_s, self._low, len(nodes))
            nodes = look_until(lambda: self._usable([]), self._are_enough, timeout_s)
        if not self._are_enough(nodes):
            raise ConfigError(
                "num_nodes=(min, max) starts with at least min nodes that have free cores.",
                expected=f"{counted(self._low, 'node')} with {counted(self._workers_per_node or 1, 'free core')} each, "
                f"within start_timeout_s={timeout_s:g}",
                got=", ".join(f"{node.address}: {node.cpus} free" for node in free_nodes()) or "no node with cores",
                remedy="Start more nodes, lower min, or raise start_timeout_s.",
            )
        node_of = assign_parts([None] * (len(self.bounds) - 1), self._weights(nodes))
        return Topology(tuple(self._places(dict(enumerate(node_of)), nodes).values()))

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool = False) -> list[Move]:
        """Reads the nodes from Ray and returns which parts should move now.

        Nothing moves while there are fewer than the least number of nodes, while a node that holds parts is lost (the
        next request to it reports the loss), or while the head of the cluster does not answer.

        Args:
            slices: The place of each part.
            leaving_only: Whether only parts on nodes that leave may move.
        """
        if not head_answers():
            self._next_look_s = dict.fromkeys((True, False), time.monotonic() + _DISTRUST_S)
            logger.warning("the head of the cluster does not answer; no environments move for %g s", _DISTRUST_S)
            return []
        nodes = self._usable([each.node_id for each in slices])
        self._next_look_s[leaving_only] = time.monotonic() + _LOOK_S
        holders = {each.node_id for each in slices}
        if not self._are_enough(nodes) or not holders <= self._raylets.keys():
            return []
        distrusted = {each: self._raylets[each] for each in holders if _is_barred(self._distrusted, each)}
        if unreachable(distrusted):
            return []
        node_of = assign_parts([each.node_id for each in slices], self._weights(nodes))
        moving = {
            k: node
            for k, (each, node) in enumerate(zip(slices, node_of, strict=True))
            if node != each.node_id
            and (each.node_id in self._leaving or not leaving_only)
            and not _is_barred(self._failed_starts, node)
        }
        places = self._places(moving, nodes)
        return [Move(k, place, slices[k].node_id in self._leaving) for k, place in places.items()]

    def replacement(
        self, number: int, slices: Sequence[NodeSlice], excluded: Collection[str], error: Exception
    ) -> NodeSlice:
        """Returns a place for a part whose node was lost; waits at most 8 s until there are enough nodes.

        Only its actor may have died: if no other node comes, and it still answers, it is used again.

        Args:
            number: Index of the part.
            slices: The last place of each part.
            excluded: Ids of lost nodes.
            error: The error that reported the loss.

        Raises:
            NodeLostError: Fewer than the least number of nodes are left, or the head of the cluster is gone; `error` is
                its cause.
        """
        check_head(error)
        current = [None if k == number or each.node_id in excluded else each.node_id for k, each in enumerate(slices)]
        usable = partial(self._usable, [each.node_id for each in slices], excluded)
        nodes = look_until(usable, self._are_enough, _REPLACE_S)
        if not self._are_enough(nodes):
            nodes = usable(lost_too=True)
        if not self._are_enough(nodes):
            raise NodeLostError(
                "With num_nodes=(min, max), at least min nodes remain.",
                expected=f"{counted(self._low, 'node')} for num_nodes=({self._low}, {self._high})",
                got=f"{len(nodes)} after a loss ({error})",
                remedy="Start more nodes, or lower min.",
            ) from error
        self._distrusted.update(dict.fromkeys(excluded, time.monotonic() + _DISTRUST_S))
        node_of = assign_parts(current, self._weights(nodes))
        return self._places({number: node_of[number]}, nodes)[number]

    def note_failed_start(self, node_id: str) -> None:
        """Moves no parts to a node for 30 s, because one could not start there. Those that it holds stay."""
        self._failed_starts[node_id] = time.monotonic() + _DISTRUST_S

    def _usable(
        self, holders: Collection[str], lost: Collection[str] = (), *, lost_too: bool = False
    ) -> list[FreeNode]:
        """Reads from Ray the nodes that may hold parts: those that do, then those that answer and have free cores.

        Ray lists a node that is gone for about a minute. One that does not answer is not tried again for 30 s.

        Args:
            holders: The nodes that hold parts, also those that are lost.
            lost: Lost nodes.
            lost_too: Whether lost nodes may hold parts again, if they answer.
        """
        self._leaving = leaving_nodes()
        listed = free_nodes(claimed_too=not self._claim_cpus)
        self._raylets = {node.node_id: node.raylet for node in listed}
        self._cores = {node_id: cores for node_id, cores in self._cores.items() if node_id in holders}
        held, wanted = set(holders) - set(lost), self._workers_per_node or 1

        def may_hold(node: FreeNode) -> bool:
            if node.node_id in lost:
                return lost_too
            failed = any(_is_barred(until, node.node_id) for until in (self._distrusted, self._failed_starts))
            return node.node_id in held or (not failed and node.cpus >= min(wanted, node.total_cpus))

        nodes = choose_nodes([node for node in listed if may_hold(node)], held, self._leaving, self._high)
        silent = unreachable({node.node_id: node.raylet for node in nodes if node.node_id not in held})
        self._distrusted.update(dict.fromkeys(silent, time.monotonic() + _DISTRUST_S))
        return [node for node in nodes if node.node_id not in silent]

    def _are_enough(self, nodes: Sequence[FreeNode]) -> bool:
        return len(nodes) >= self._low

    def _weights(self, nodes: Sequence[FreeNode]) -> dict[str, int]:
        """Returns the cores that the workers of each node use."""
        for node in nodes:
            self._cores.setdefault(node.node_id, self._workers_per_node or max(1, node.cpus))
        return {node.node_id: self._cores[node.node_id] for node in nodes}

    def _places(self, node_of: Mapping[int, str], nodes: Sequence[FreeNode]) -> dict[int, NodeSlice]:
        """Returns the place of each part, with its workers and the free cores that it claims."""
        addresses = {node.node_id: node.address for node in nodes}
        free = {node.node_id: float(node.cpus) if self._claim_cpus else 0.0 for node in nodes}
        places = {}
        for part, node_id in node_of.items():
            first, stop = self.bounds[part : part + 2]
            cores = -(-self._cores[node_id] // self._parts_per_node)
            num_workers = min(stop - first, self._max_workers if self._worker_per_env else cores)
            num_cpus = max(0, min(cores, self._cores_per_worker * num_workers, free[node_id]))
            free[node_id] -= num_cpus
            bounds = even_bounds(stop - first, num_workers, first)
            places[part] = NodeSlice(node_id, addresses[node_id], bounds, num_cpus)
        return places
