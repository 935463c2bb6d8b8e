"""One rank of a group: what runs in its process."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayvec.cluster.node_variables import restore_variables
from rayvec.data.topology import Topology
from rayvec.distributed.allreduce_shared_memory import SharedMemoryRanks, can_share_memory
from rayvec.distributed.allreduce_torch import check_device
from rayvec.distributed.choose_allreduce import open_ranks
from rayvec.distributed.memory_file import can_open
from rayvec.distributed.rank_host import MakeStore, RankPlacement
from rayvec.errors import RemoteFailure
from rayvec.learners.ranks import ALONE, ClosableRanks
from rayvec.pools.in_process_base import FAILURES, captured

__all__ = ["RankActor", "RankOffer", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class RankOffer:
    """What a rank offers to the others before they connect.

    Attributes:
        pid: Process of the rank.
        shares_memory: Whether its machine lets ranks share memory.
        path: Of the shared memory that the first rank of a node holds for the others.
        reads_memory: Whether it can open the memory files of the driver.
    """

    pid: int
    shares_memory: bool
    path: str | None
    reads_memory: bool


def _returning_failures(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method of a rank return the failure in the place of an exception; the rank then leaves the others."""

    @functools.wraps(method)
    def returning(self: RankActor, *args: Any) -> Any:
        try:
            return method(self, *args)
        except FAILURES as error:
            return self.leave(error)

    return returning


class RankActor:
    """Holds one object and calls its methods.

    No method raises what the object raised: it returns a :class:`~rayvec.errors.RemoteFailure`. A rank whose object
    raised leaves the others, so that no rank waits for it.

    Args:
        placement: Where this rank is.
        device: ``"cpu"`` or ``"cuda"``.
        threads: Number of threads that torch may use.
        timeout_s: How long ranks wait for each other, in seconds.
    """

    def __init__(self, placement: RankPlacement, device: str, threads: int, timeout_s: float) -> None:
        self._placement, self._device, self._timeout_s = placement, device, timeout_s
        self._ranks: ClosableRanks = ALONE
        self._block: SharedMemoryRanks | None = None
        self._object: Any = None
        torch.set_num_threads(threads)
        Topology.this_process = f"the process of {placement}"
        if placement.node_id:
            restore_variables("OMP_NUM_THREADS", *([] if device == "cuda" else ["CUDA_VISIBLE_DEVICES"]))
            Topology.this_node = (placement.node_id, placement.host)

    @_returning_failures
    def offer(self, probe: str = "", content: bytes = b"") -> RankOffer:
        """Prepares what the other ranks will need from this one.

        Args:
            probe: Path of a memory file of the driver, if this rank is on the driver's node.
            content: The bytes in it.
        """
        check_device(self._device)
        place = self._placement
        if place.node_rank == 0 and place.node_size > 1 and self._device == "cpu" and can_share_memory():
            self._block = SharedMemoryRanks(0, place.node_size, timeout_s=self._timeout_s)
        path = self._block.path if self._block else None
        return RankOffer(os.getpid(), can_share_memory(), path, bool(probe) and can_open(probe, content))

    @_returning_failures
    def join(self, make_store: MakeStore, path: str | None, share_memory: bool, make: bytes) -> None:
        """Connects to the other ranks and makes the object.

        Args:
            make_store: Makes the store through which ranks that don't share memory exchange addresses.
            path: Of the shared memory of this node.
            share_memory: Whether all ranks can share memory.
            make: Pickled function of this rank's `Ranks` that returns the object.
        """
        self._ranks = open_ranks(
            self._placement,
            make_store,
            self._block or path,
            share_memory,
            device=self._device,
            timeout_s=self._timeout_s,
        )
        self._object = pickle.loads(make)(self._ranks)

    @_returning_failures
    def call(self, name: str, *args: Any) -> Any:
        """Calls a method of the object."""
        return getattr(self._object, name)(*args)

    @_returning_failures
    def state_dict(self) -> Any:
        """Returns the object's ``state_dict()`` in a form that Ray carries without copies."""
        return pack(self._object.state_dict())

    @_returning_failures
    def load_state_dict(self, *states: Any) -> None:
        """Hands the object one state: what `state_dict` returned, then rank-local parts, all packed."""
        self._object.load_state_dict({key: part for each in states for key, part in unpack(each).items()})

    def leave(self, error: BaseException) -> RemoteFailure:
        """Leaves the other ranks because of an error; returns what to tell the driver of it, see `captured`."""
        self._ranks.close()
        return captured(error, f"{self._placement} (process {os.getpid()})")


_SMALL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor's bytes: an array of its own, or where they begin in the array that small ones share."""

    place: NDArray[Any] | int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tree with leaves in the place of tensors, and the bytes of the small ones.

    Ray carries arrays without copies, but each one at a cost of its own, which for a bias is more than that of a copy.
    """

    tree: Any
    shared: NDArray[np.uint8]


def pack(state: Any) -> Any:
    """Returns a tree of dicts, lists and tuples in a form that Ray carries quickly."""
    shared: list[NDArray[np.uint8]] = []
    size = 0

    def packed(tree: Any) -> Any:
        nonlocal size
        if not isinstance(tree, Tensor):
            return _mapped(packed, tree)
        flat = tree.detach().cpu().contiguous().view(-1)
        array = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
        if array.nbytes > _SMALL_BYTES:
            return _Leaf(array, tree.dtype, tuple(tree.shape))
        leaf = _Leaf(size, tree.dtype, tuple(tree.shape))
        shared.append(array)
        size += array.nbytes
        return leaf

    tree = packed(state)
    return _Packed(tree, np.concatenate([np.zeros(0, np.uint8), *shared]))


def unpack(state: Any) -> Any:
    """Returns what `pack` was given, its tensors new and on the CPU."""

    def unpacked(tree: Any) -> Any:
        if not isinstance(tree, _Leaf):
            return _mapped(unpacked, tree)
        tensor = torch.empty(tree.shape, dtype=tree.dtype)
        if tensor.numel():
            place, flat = tree.place, tensor.view(-1).view(torch.uint8).numpy()
            flat[:] = state.shared[place : place + len(flat)] if isinstance(place, int) else place
        return tensor

    return unpacked(state.tree)


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: function(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(function(value) for value in tree)
    return tree
