"""Rank placement: from a cluster's free cores and GPUs to the node of each rank, also while nodes join and leave."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rayvec.cluster.nodes import choose_nodes, free_nodes, leaving_nodes, look_until
from rayvec.data.topology import even_bounds
from rayvec.distributed.rank import RankPlacement, divided_workers
from rayvec.errors import ConfigError, counted

_PLACE_S = 10.0
_POLL_INTERVAL_S = 0.25
_JOIN_TIMEOUT_S = 3.0
"""How long a node that has just joined may take to answer, or to have its cores shown as free."""
_NODES_INTERVAL_S = 1.0
"""How often nodes that joined or leave are looked for."""
_WAIT_S = 300.0
_WAIT_AGAIN_S = 8.0


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What each rank claims, and where.

    Attributes:
        num_cpus: Cores that each rank claims.
        num_gpus: GPUs that each rank claims.
        nodes: Ids of the nodes that may be used; None for all.
        avoid_nodes: Ids of nodes that may not be used.
        num_nodes: Over how many nodes ranks are spread evenly; None for as few as possible.
    """

    num_cpus: int
    num_gpus: int
    nodes: Collection[str] | None = None
    avoid_nodes: Collection[str] = ()
    num_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A node and the number of ranks that fit on it.

    Attributes:
        node_id: Ray's node id, in hexadecimal.
        host: The node's own IP address.
        capacity: How many ranks fit.
        cpus: Number of free whole cores.
        all_cpus: Number of whole cores, whether they are free or not.
    """

    node_id: str
    host: str
    capacity: int
    cpus: int = 0
    all_cpus: int = 0


def place_ranks(nodes: Sequence[NodeCapacity], num_ranks: int, num_nodes: int | None = None) -> list[RankPlacement]:
    """Places ranks on as few nodes as possible, since those of one node sum fastest; of equal nodes on the first.

    With `num_nodes`, it spreads them evenly over the largest nodes, if these have room.

    Raises:
        ConfigError: The nodes have too little capacity.

    >>> nodes = [NodeCapacity("a", "10.0.0.1", 1), NodeCapacity("b", "10.0.0.2", 2)]
    >>> [placement.host for placement in place_ranks(nodes, 3)]
    ['10.0.0.2', '10.0.0.2', '10.0.0.1']
    >>> [placement.host for placement in place_ranks(nodes, 2, num_nodes=2)]
    ['10.0.0.2', '10.0.0.1']
    """
    if sum(node.capacity for node in nodes) < num_ranks:
        raise ConfigError(
            f"There is no room for {counted(num_ranks, 'rank')}: "
            f"{', '.join(f'{node.host}: room for {node.capacity}' for node in nodes) or 'no node that may be used'}. "
            "Each needs free cores, and with CUDA a free GPU. Ask for fewer ranks, workers, threads or nodes of "
            "environments, add a node, or pass num_cpus=0 to a LearnerGroup."
        )
    chosen = _spread(nodes, num_ranks, num_nodes) if num_nodes else []
    unused = list(nodes)
    while (left := num_ranks - sum(count for _, count in chosen)) > 0:
        node = next((each for each in unused if each.capacity >= left), None) or max(unused, key=lambda n: n.capacity)
        unused.remove(node)
        chosen.append((node, min(left, node.capacity)))
    places = [(number, node) for number, (node, count) in enumerate(chosen) for _ in range(count)]
    return [
        RankPlacement(rank, num_ranks, node.node_id, node.host, number, len(chosen))
        for rank, (number, node) in enumerate(places)
    ]


def _spread(nodes: Sequence[NodeCapacity], num_ranks: int, num_nodes: int) -> list[tuple[NodeCapacity, int]]:
    """Returns the largest nodes with an even share of the ranks each; none if a share does not fit."""
    largest = sorted(nodes, key=lambda node: -node.capacity)[:num_nodes]
    shares = sorted((stop - start for start, stop in pairwise(even_bounds(num_ranks, num_nodes))), reverse=True)
    chosen = list(zip(largest, shares, strict=False))
    fits = len(chosen) == num_nodes and all(node.capacity >= share for node, share in chosen)
    return chosen if fits else []


def find_placements(num_ranks: int, request: ResourceRequest, *, fewer: bool = False) -> list[RankPlacement]:
    """Places ranks on the connected cluster; waits for at most 10 s until claims that were just returned are free.

    Args:
        num_ranks: Number of ranks.
        request: What each claims.
        fewer: Whether fewer ranks, at least one, may be placed where there is no room for all. Where no core is
            claimed, none will come free, and it does not wait.

    Raises:
        ConfigError: The cluster has too little capacity.
    """
    began_s = time.monotonic()
    while True:
        nodes, waited_s = capacities(request), time.monotonic() - began_s
        room = sum(node.capacity for node in nodes)
        is_even = not request.num_nodes or bool(_spread(nodes, num_ranks, request.num_nodes))
        if room >= num_ranks and (is_even or not fewer or waited_s > _JOIN_TIMEOUT_S):
            return place_ranks(nodes, num_ranks, request.num_nodes)
        is_late = waited_s > _PLACE_S
        if fewer and room and (is_late or all(node.cpus == node.all_cpus for node in nodes)):
            return place_ranks(nodes, room)
        if is_late:
            return place_ranks(nodes, num_ranks)  # which raises
        time.sleep(_POLL_INTERVAL_S)


def rank_share(
    num_ranks: int, num_nodes: int | None, workers_per_node: int | None, *, is_restart: bool = False
) -> tuple[int, int, int]:
    """Returns over how many nodes decentralized ranks are spread, how many workers each has, and how many cores.

    A rank claims a core for each worker, or its share of the smallest node where it has more workers than that.

    Args:
        num_ranks: Number of ranks.
        num_nodes: On how many nodes; by default as many as have free cores.
        workers_per_node: Workers on each node, divided among its ranks; by default one for each of its free cores.
        is_restart: Whether it is about ranks that replace lost ones: nodes may be missing, and cores that the lost ones
            claimed count as free.

    Raises:
        ConfigError: After three seconds there are still fewer than `num_nodes` nodes with free cores, or none.
    """
    request = ResourceRequest(0 if is_restart else 1, 0)  # with 0, all cores of a node count
    needed = 1 if is_restart else num_nodes or 1

    def count_free() -> list[NodeCapacity]:
        return sorted((node for node in capacities(request) if node.capacity), key=lambda node: -node.capacity)

    free = look_until(count_free, lambda free: len(free) >= needed, _JOIN_TIMEOUT_S)
    count = min(num_ranks, num_nodes or len(free), len(free))
    if len(free) < needed:
        raise ConfigError(
            f"{counted(len(free), 'node')} of {needed} for decentralized ranks have free cores. Lower num_nodes, "
            "or add nodes."
        )
    per_node = -(-num_ranks // count)
    workers = divided_workers(workers_per_node, free[count - 1].capacity, per_node)
    largest_claim = max(1, min(node.all_cpus for node in free[:count]) // per_node)
    return count, workers, min(workers, largest_claim)


def capacities(request: ResourceRequest) -> list[NodeCapacity]:
    """Returns the nodes that may be used and that the network reaches, the driver's own first.

    Raises:
        NodeLostError: Ray is not initialised.
    """
    nodes = free_nodes()
    found = []
    for node in nodes:
        is_wanted = request.nodes is None or node.node_id in request.nodes
        if not is_wanted or node.node_id in request.avoid_nodes:
            continue
        cpus = int(node.cpus)
        capacity = cpus // request.num_cpus if request.num_cpus else node.all_cpus
        if request.num_gpus:
            capacity = min(capacity, int(node.free.get("GPU", 0) // request.num_gpus))
        found.append(NodeCapacity(node.node_id, node.address, capacity, cpus, node.all_cpus))
    return found


class RankNodes:
    """Chooses nodes for decentralized ranks while nodes join and leave, and says when others should be chosen.

    Args:
        num_nodes: The least and the greatest number of nodes.
        num_learners: Number of ranks on the greatest number of nodes. On fewer nodes there are fewer, in proportion.
        cores: Cores of each node that the run has used, by id: its ranks may still claim them. Chosen nodes are added.
        request: What must be free on a node that the run has not used.

    Attributes:
        num_ranks: Number of ranks.
        node_ids: Ids of the chosen nodes.

    Raises:
        ConfigError: There are too few nodes: at the start after 300 s, later after 8 s.
    """

    def __init__(
        self, num_nodes: tuple[int, int], num_learners: int, cores: dict[str, int], request: ResourceRequest
    ) -> None:
        self._low, self._high = num_nodes
        self._request = request
        self._cores = cores
        self.node_ids: tuple[str, ...] = ()
        timeout_s = _WAIT_AGAIN_S if cores else _WAIT_S
        found = look_until(lambda: capacities(request), lambda nodes: len(self._choose(nodes)) >= self._low, timeout_s)
        chosen = self._choose(found)
        if len(chosen) < self._low:
            raise ConfigError(
                f"There are fewer than {counted(self._low, 'node')} with {counted(request.num_cpus, 'core')} in "
                f"{timeout_s:g} s: {', '.join(f'{node.host}: {node.cpus} free' for node in found) or 'none'}. "
                "Start more nodes, or lower the minimum of num_nodes=(min, max)."
            )
        self._cores.update((node.node_id, node.cpus) for node in chosen if node.node_id not in self._cores)
        self.node_ids = tuple(node.node_id for node in chosen)
        self.num_ranks = max(1, num_learners * len(chosen) // self._high)
        self._next_read_s = time.monotonic() + _NODES_INTERVAL_S
        self._has_changed = False

    def workers_per_rank(self, workers_per_node: int | None) -> int:
        """Returns how many workers each rank has; by default, the ranks of the smallest node divide its cores."""
        per_node = -(-self.num_ranks // len(self.node_ids))
        return divided_workers(workers_per_node, min(self._cores[node_id] for node_id in self.node_ids), per_node)

    def has_changed(self, used: Collection[str]) -> bool:
        """Whether other nodes should be used: one has joined, or one of them leaves. It reads them once a second.

        A node that is gone is no change: its ranks are lost.

        Args:
            used: Ids of the nodes that ranks are on; the chosen ones may have had no room.
        """
        if not self._has_changed and time.monotonic() >= self._next_read_s:
            found = capacities(self._request)
            chosen = {node.node_id for node in self._choose(found)}
            alive = {node.node_id for node in found}
            is_enough = len(chosen) >= self._low and alive.issuperset(used)
            self._has_changed = is_enough and chosen != alive.intersection(self.node_ids)
            self._next_read_s = time.monotonic() + _NODES_INTERVAL_S
        return self._has_changed

    def _choose(self, found: Sequence[NodeCapacity]) -> list[NodeCapacity]:
        fitting = [node for node in found if node.capacity or node.node_id in self._cores]
        return choose_nodes(fitting, self.node_ids, leaving_nodes(), self._high)
