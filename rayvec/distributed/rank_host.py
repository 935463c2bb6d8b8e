"""Where ranks run: what starts their processes and carries calls to them.

There are two hosts: :class:`~rayvec.distributed.ray_host.RayHost` runs ranks as actors of a Ray cluster, and
:class:`~rayvec.distributed.process_host.ProcessHost` as processes of this machine, without Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import psutil

from rayvec.errors import RankLostError

if TYPE_CHECKING:
    from rayvec.distributed.process_host import ProcessHost
    from rayvec.distributed.ray_host import RayHost

__all__ = [
    "MakeStore",
    "RankHost",
    "RankPlacement",
    "RunningRank",
    "VitalSigns",
    "divided_workers",
    "lost",
    "vital_signs",
]

MakeStore = Callable[[float], Any]
"""Returns a store of torch.distributed through which ranks exchange addresses, given how long to wait for a key."""


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where a rank runs, and its place among the others.

    Attributes:
        rank: Its number among all ranks.
        size: Number of ranks.
        node_id: Ray's id of its node; empty without Ray.
        host: That node's own address.
        node_rank: Its number among the ranks of its node.
        node_size: Number of ranks on its node.
        node: Number of its node among those that have ranks.
        num_nodes: Number of nodes that have ranks.
    """

    rank: int
    size: int
    node_id: str
    host: str
    node_rank: int
    node_size: int
    node: int
    num_nodes: int

    def __str__(self) -> str:
        """The rank for a person."""
        return f"rank {self.rank} on {self.host}" + (f"/{self.node_id[:8]}" if self.node_id else "")


@dataclass(slots=True, eq=False)
class RunningRank:
    """A rank as the driver sees it.

    Attributes:
        placement: Where it runs.
        handle: Its actor or process.
        pid: Its process, on its own node; 0 until it has answered.
        reads_memory: Whether it can open the memory files of the driver.
    """

    placement: RankPlacement
    handle: Any
    pid: int = 0
    reads_memory: bool = False


class VitalSigns(NamedTuple):
    """CPU time and state of a process.

    Attributes:
        cpu_s: CPU time that it has used, in seconds.
        is_stopped: Whether a signal has stopped it.
    """

    cpu_s: float
    is_stopped: bool


def vital_signs(pid: int) -> VitalSigns | None:
    """Returns CPU time and state of a process of this machine; None if it has ended."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return VitalSigns(times.user + times.system, process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:  # not raised: Ray would log an error of a task whose result nothing reads
        return None


RankHost: TypeAlias = "RayHost | ProcessHost"
"""Starts ranks, each a :class:`~rayvec.distributed.rank_actor.RankActor` in a process, and calls their methods."""


def divided_workers(workers_per_node: int | None, num_cores: int, num_ranks: int) -> int:
    """Returns how many workers each of a node's ranks has; by default the ranks divide its cores.

    >>> divided_workers(None, 8, 3), divided_workers(4, 8, 2), divided_workers(0, 8, 2)
    (2, 2, 0)
    """
    num_workers = num_cores if workers_per_node is None else workers_per_node
    return 0 if workers_per_node == 0 else max(1, num_workers // num_ranks)


def lost(rank: RunningRank, reason: str) -> RankLostError:
    """Returns the error for a rank that no longer answers."""
    return RankLostError(
        "A rank lives until its group is closed.",
        expected=f"{rank.placement} (process {rank.pid or 'not yet known'}) to answer",
        got=reason,
        remedy="Look into the log of its node for what ended it",
    )
