"""Ranks on several nodes: the ranks of a node sum among themselves, then one rank of each node sums with the others."""

from __future__ import annotations

from torch import Tensor

from rayvec.learners.ranks import ClosableRanks

__all__ = ["TwoLevelRanks"]


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
