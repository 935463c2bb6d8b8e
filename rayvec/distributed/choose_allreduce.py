"""Chooses how ranks sum their gradients, by where the ranks are.

Ranks of one node sum in shared memory, ranks on several nodes or GPUs by a collective of torch. Where several ranks are
on each of several nodes, those of a node sum first, then one rank of each node sums with the others.
"""

from __future__ import annotations

from torch import Tensor

from rayvec.distributed.allreduce_shared_memory import SharedMemoryRanks
from rayvec.distributed.allreduce_torch import CollectiveRanks
from rayvec.distributed.rank_host import MakeStore, RankPlacement
from rayvec.learners.ranks import ALONE, ClosableRanks

__all__ = ["TwoLevelRanks", "open_ranks"]


def open_ranks(
    place: RankPlacement,
    make_store: MakeStore,
    block: SharedMemoryRanks | str | None,
    share_memory: bool,
    *,
    device: str,
    timeout_s: float,
) -> ClosableRanks:
    """Connects a rank to the others by the all-reduce that suits their places.

    Args:
        place: Where the rank is.
        make_store: Makes the store through which ranks that don't share memory exchange addresses.
        block: On the first rank of a node, its shared memory; on the others, the path of it.
        share_memory: Whether all ranks can share memory.
        device: ``"cpu"`` or ``"cuda"``.
        timeout_s: How long ranks wait for each other, in seconds.
    """

    def collective(rank: int, size: int) -> CollectiveRanks:
        return CollectiveRanks(rank, size, make_store(timeout_s), host=place.host, device=device, timeout_s=timeout_s)

    if place.size == 1:
        return ALONE
    if device == "cuda" or not share_memory or place.num_nodes == place.size:
        return collective(place.rank, place.size)
    on_node: ClosableRanks = ALONE
    if isinstance(block, SharedMemoryRanks):
        on_node = block
    elif place.node_size > 1:
        on_node = SharedMemoryRanks(place.node_rank, place.node_size, block, timeout_s=timeout_s)
    if place.num_nodes == 1:
        return on_node
    leaders = collective(place.node, place.num_nodes) if place.node_rank == 0 else None
    return TwoLevelRanks(place.rank, place.size, on_node, leaders)


class TwoLevelRanks:
    """One of several ranks on several nodes; see :class:`~rayvec.learners.ranks.Ranks`.

    Args:
        rank: Number of this rank among all.
        size: Number of ranks.
        node: This rank among those of its node; its rank 0 leads the node.
        leaders: This rank among the leaders of nodes; None for a rank that does not lead.

    Attributes:
        rank: Number of this rank among all.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int, node: ClosableRanks, leaders: ClosableRanks | None) -> None:
        self.rank, self.size = rank, size
        self._node, self._leaders = node, leaders

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to other nodes so far."""
        return self._leaders.sent_bytes if self._leaders is not None else 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over all ranks, with the same bits on each; returns it.

        The sum of the leaders reaches the other ranks of a node by a second sum, to which these add zeros.

        Raises:
            RankLostError: A rank exited, or did not call `sum_` in time.
        """
        self._node.sum_(tensor)
        if self._leaders is None:
            tensor.zero_()
        else:
            self._leaders.sum_(tensor)
        return self._node.sum_(tensor)

    def close(self) -> None:
        """Leaves, on both levels. May be called again."""
        self._node.close()
        if self._leaders is not None:
            self._leaders.close()
