"""One rank of a group: what runs in its Ray actor. Nothing here imports Ray."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayvec.distributed.collective import CollectiveRanks, RankStore, check_device
from rayvec.distributed.hierarchical import TwoLevelRanks
from rayvec.distributed.shared_memory import SharedMemoryRanks, can_share_memory
from rayvec.errors import RemoteFailure
from rayvec.learners.ranks import ALONE, ClosableRanks

__all__ = ["Meeting", "RankActor", "Seat", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank runs, and its place among the others.

    Attributes:
        rank: Its number among all ranks.
        size: How many there are.
        node_id: Ray's id of its node.
        host: That node's own address.
        node_rank: Its number among the ranks of its node.
        node_size: How many those are.
        node: Number of its node among those that have ranks.
        num_nodes: How many those are.
    """

    rank: int
    size: int
    node_id: str
    host: str
    node_rank: int
    node_size: int
    node: int
    num_nodes: int

    @property
    def name(self) -> str:
        """The rank for a person."""
        return f"rank {self.rank} on {self.host}/{self.node_id[:8]}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a rank offers to the others, and what all of them then know.

    Attributes:
        pid: Process of the rank.
        shares_memory: Whether its machine lets ranks share memory.
        path: Of the shared memory that the first rank of a node holds for the others.
        store: Address of the store at rank 0.
    """

    pid: int
    shares_memory: bool
    path: str | None = None
    store: tuple[str, int] | None = None


class RankActor:
    """Holds one object and calls its methods.

    No method raises what the object raised: it returns a :class:`~rayvec.errors.RemoteFailure`. A rank on which
    something was raised takes leave of the others, so that none waits for it.

    Args:
        seat: Where this is.
        device: ``"cpu"`` or ``"cuda"``.
        threads: How many torch may use.
        timeout_s: How long ranks wait for each other, in seconds.
    """

    def __init__(self, seat: Seat, device: str, threads: int, timeout_s: float) -> None:
        self._seat, self._device, self._timeout_s = seat, device, timeout_s
        self._ranks: ClosableRanks = ALONE
        self._store: RankStore | None = None
        self._block: SharedMemoryRanks | None = None
        self._object: Any = None
        torch.set_num_threads(threads)

    def offer(self) -> Meeting | RemoteFailure:
        """Prepares what the other ranks will need from this one."""

        def prepare() -> Meeting:
            check_device(self._device)
            seat = self._seat
            if seat.rank == 0 and seat.size > 1:
                self._store = RankStore(seat.host, self._timeout_s)
            if seat.node_rank == 0 and seat.node_size > 1 and self._device == "cpu" and can_share_memory():
                self._block = SharedMemoryRanks(0, seat.node_size, timeout_s=self._timeout_s)
            path = self._block.path if self._block else None
            return Meeting(os.getpid(), can_share_memory(), path, self._store.address if self._store else None)

        return self._guard(prepare)  # type: ignore[no-any-return]

    def join(self, meeting: Meeting, make: bytes) -> RemoteFailure | None:
        """Meets the other ranks and makes the object.

        Args:
            meeting: The block of this node and the store of all; whether all ranks share memory.
            make: Pickled function of this rank's `Ranks` that returns the object.
        """

        def begin() -> None:
            self._ranks = self._meet(meeting)
            self._object = pickle.loads(make)(self._ranks)

        return self._guard(begin)  # type: ignore[no-any-return]

    def _meet(self, meeting: Meeting) -> ClosableRanks:
        seat = self._seat
        if seat.size == 1:
            return ALONE
        if self._device == "cuda" or not meeting.shares_memory or seat.num_nodes == seat.size:
            return self._collective(meeting, seat.rank, seat.size)
        node = self._node_ranks(meeting)
        if seat.num_nodes == 1:
            return node
        leaders = self._collective(meeting, seat.node, seat.num_nodes) if seat.node_rank == 0 else None
        return TwoLevelRanks(seat.rank, seat.size, node, leaders)

    def _collective(self, meeting: Meeting, rank: int, size: int) -> CollectiveRanks:
        assert meeting.store is not None
        return CollectiveRanks(
            rank, size, meeting.store, host=self._seat.host, device=self._device, timeout_s=self._timeout_s
        )

    def _node_ranks(self, meeting: Meeting) -> ClosableRanks:
        seat = self._seat
        if seat.node_size == 1:
            return ALONE
        if self._block is not None:
            return self._block
        return SharedMemoryRanks(seat.node_rank, seat.node_size, meeting.path, timeout_s=self._timeout_s)

    def call(self, name: str, *args: Any) -> Any:
        """Calls a method of the object."""
        return self._guard(lambda: getattr(self._object, name)(*args))

    def state_dict(self) -> Any:
        """Returns the object's ``state_dict()`` in a form that Ray carries without copies."""
        return self._guard(lambda: pack(self._object.state_dict()))

    def load_state_dict(self, state: Any, own: Any = None) -> Any:
        """Hands the object what `state_dict` returned, together with what belongs to this rank alone."""
        return self._guard(lambda: self._object.load_state_dict({**unpack(state), **(unpack(own) if own else {})}))

    def _guard(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            self._ranks.close()
            return RemoteFailure.capture(error, f"{self._seat.name} (process {os.getpid()})")


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
