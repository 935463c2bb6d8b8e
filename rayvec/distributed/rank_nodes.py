"""The nodes that decentralized ranks use while nodes join and leave the cluster."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from rayvec.cluster.elastic_placement import leaving_nodes
from rayvec.cluster.placement import choose_nodes, look_until
from rayvec.distributed.rank_host import divided_workers
from rayvec.distributed.rank_placement import NodeCapacity, ResourceRequest, capacities
from rayvec.errors import ConfigError

__all__ = ["RankNodes"]

_LOOK_S = 1.0
_WAIT_S = 300.0
_WAIT_AGAIN_S = 8.0


class RankNodes:
    """Chooses nodes for ranks, and says when others should be chosen.

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
                "num_nodes=(min, max) needs at least min nodes that have free cores, and with CUDA a free GPU.",
                expected=f"{self._low} such node(s) with {request.num_cpus} core(s) within {timeout_s:g} s",
                got=", ".join(f"{node.host}: {node.cpus} free" for node in found) or "none",
                remedy="Start more nodes, or lower min.",
            )
        self._cores.update((node.node_id, node.cpus) for node in chosen if node.node_id not in self._cores)
        self.node_ids = tuple(node.node_id for node in chosen)
        self.num_ranks = max(1, num_learners * len(chosen) // self._high)
        self._next_look_s = time.monotonic() + _LOOK_S
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
        if not self._has_changed and time.monotonic() >= self._next_look_s:
            found = capacities(self._request)
            chosen = {node.node_id for node in self._choose(found)}
            alive = {node.node_id for node in found}
            is_enough = len(chosen) >= self._low and alive.issuperset(used)
            self._has_changed = is_enough and chosen != alive.intersection(self.node_ids)
            self._next_look_s = time.monotonic() + _LOOK_S
        return self._has_changed

    def _choose(self, found: Sequence[NodeCapacity]) -> list[NodeCapacity]:
        fitting = [node for node in found if node.capacity or node.node_id in self._cores]
        return choose_nodes(fitting, self.node_ids, leaving_nodes(), self._high)
