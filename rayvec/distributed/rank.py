"""One rank of a group: where it is, and what runs in its process."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.cluster.node_facts import restore_variables
from rayvec.data.topology import Topology
from rayvec.distributed.allreduce_shared_memory import SharedMemoryRanks, can_share_memory
from rayvec.distributed.allreduce_torch import CollectiveRanks, check_device
from rayvec.envs.failures import FAILURES, captured
from rayvec.errors import RankLostError, RemoteFailure
from rayvec.learners.ranks import ALONE, Ranks
from rayvec.node.processes import remove_folder

MakeStore = Callable[[float], Any]
"""Returns a store of torch.distributed through which ranks exchange addresses, given how long to wait for a key."""


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where a rank runs.

    Attributes:
        rank: Its number among all ranks.
        size: Number of ranks.
        node_id: Ray's id of its node; empty without Ray.
        host: That node's own address.
        node: Number of its node among those that have ranks.
        num_nodes: Number of nodes that have ranks.
    """

    rank: int
    size: int
    node_id: str
    host: str
    node: int
    num_nodes: int

    def __str__(self) -> str:
        """The rank for a person."""
        return f"rank {self.rank} on {self.host}" + (f"/{self.node_id[:8]}" if self.node_id else "")


class Rank:
    """Holds one object and calls its methods.

    A rank whose object raised leaves the others, so that no rank waits for it.

    Args:
        placement: Where this rank is.
        device: ``"cpu"`` or ``"cuda"``.
        threads: Number of threads that torch may use.
        timeout_s: How long ranks wait for each other, in seconds.
    """

    def __init__(self, placement: RankPlacement, device: str, threads: int, timeout_s: float) -> None:
        self._placement, self._device, self._timeout_s = placement, device, timeout_s
        self._ranks: Ranks = ALONE
        self._object: Any = self  # until `join` has made it
        torch.set_num_threads(threads)
        Topology.this_process = f"the process of {placement}"
        if placement.node_id:
            restore_variables("OMP_NUM_THREADS", *([] if device == "cuda" else ["CUDA_VISIBLE_DEVICES"]))
            Topology.this_node = (placement.node_id, placement.host)

    def call(self, name: str, *args: Any) -> Any:
        """Calls a method of the object; returns a :class:`~rayvec.errors.RemoteFailure` in place of an exception."""
        try:
            result = getattr(self._object, name)(*args)
        except FAILURES as error:
            return self.leave(error)
        if name == "close":
            remove_folder()  # here, because Ray kills this process
        return result

    def prepare(self) -> tuple[int, str | None]:
        """Returns the process of this rank, and the path of the memory through which all ranks sum, if they do so."""
        check_device(self._device)
        placement = self._placement
        is_shared = placement.size > 1 and placement.num_nodes == 1 and self._device == "cpu" and can_share_memory()
        if placement.rank or not is_shared:
            return os.getpid(), None
        block = SharedMemoryRanks(0, placement.size, timeout_s=self._timeout_s)
        self._ranks = block
        return os.getpid(), block.path

    def join(self, make_store: MakeStore, path: str | None, make: bytes) -> None:
        """Connects to the other ranks and makes the object.

        Args:
            make_store: Makes the store through which ranks that don't share memory exchange addresses.
            path: Of the memory of rank 0, if ranks sum in it.
            make: Pickled function of this rank's `Ranks` that returns the object.
        """
        placement, timeout_s = self._placement, self._timeout_s
        if path is not None and placement.rank:
            self._ranks = SharedMemoryRanks(placement.rank, placement.size, path, timeout_s=timeout_s)
        elif path is None and placement.size > 1:
            store = make_store(timeout_s)
            self._ranks = CollectiveRanks(
                placement.rank, placement.size, store, host=placement.host, device=self._device, timeout_s=timeout_s
            )
        self._object = pickle.loads(make)(self._ranks)

    def leave(self, error: BaseException) -> RemoteFailure:
        """Leaves the other ranks because of an error; returns what to tell the driver of it, see `captured`."""
        self._ranks.close()
        return captured(error, f"{self._placement} (process {os.getpid()})")


def divided_workers(workers_per_node: int | None, num_cores: int, num_ranks: int) -> int:
    """Returns how many workers each of a node's ranks has; by default the ranks divide its cores.

    >>> divided_workers(None, 8, 3), divided_workers(4, 8, 2), divided_workers(0, 8, 2)
    (2, 2, 0)
    """
    num_workers = num_cores if workers_per_node is None else workers_per_node
    return 0 if workers_per_node == 0 else max(1, num_workers // num_ranks)


def lost(placement: RankPlacement, reason: str) -> RankLostError:
    """Returns the error for a rank that no longer answers.

    >>> print(lost(RankPlacement(1, 2, "", "127.0.0.1", 0, 1), "its process has ended"))
    rank 1 on 127.0.0.1 is lost: its process has ended. All ranks of its group have ended with it. The log of its \
node, or the kernel's (out of memory), may say why.
    """
    return RankLostError(
        f"{placement} is lost: {reason.removesuffix('.')}. All ranks of its group have ended with it. The log of its "
        "node, or the kernel's (out of memory), may say why."
    )


def pack(state: Any) -> NDArray[np.uint8]:
    """Returns dicts, lists and tuples of tensors and plain values in a form that processes exchange quickly."""
    file = io.BytesIO()
    torch.save(state, file)
    return np.frombuffer(file.getbuffer(), np.uint8)


def unpack(packed: NDArray[np.uint8]) -> Any:
    """Returns what `pack` was given, its tensors new and on the CPU."""
    return torch.load(io.BytesIO(packed.data), map_location="cpu", weights_only=True)
