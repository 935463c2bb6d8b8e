"""Shared memory for the published weights of one policy, which the workers of a node read."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from rayvec.node.shared_memory import allocate
from rayvec.pools.base import MOST_CHUNKS

__all__ = ["WeightMemory"]

_ITEM_BYTES = 4


class WeightMemory:
    """Slots of one flat vector each.

    The first publication sets the size of a slot. An unused slot takes no physical memory.

    Args:
        num_workers: The number of workers that may act with different weights. There is one slot for each chunk that
            may be pending in a worker, and one for newly published weights.
        fd: The file descriptor of existing memory, or None to create it. This object closes it.
    """

    def __init__(self, num_workers: int, fd: int | None = None) -> None:
        self._num_slots = MOST_CHUNKS * num_workers + 1
        self.fd = os.memfd_create("rayvec", os.MFD_CLOEXEC) if fd is None else fd
        self._slots: NDArray[np.float32] | None = None

    def write(self, weights: NDArray[np.float32], in_use: Collection[int | None]) -> int:
        """Copies weights, ``float32 [P]``, into a slot that is not in use. Returns the slot's number."""
        if self._slots is None:
            allocate(self.fd, self._num_slots * weights.size * _ITEM_BYTES)
        slot = next(slot for slot in range(self._num_slots) if slot not in in_use)
        self._map()[slot] = weights
        return slot

    def read(self, slot: int) -> NDArray[np.float32]:
        """Returns a view of the weights in a slot, ``float32 [P]``."""
        view: NDArray[np.float32] = self._map()[slot]
        return view

    def _map(self) -> NDArray[np.float32]:
        if self._slots is None:
            size = os.fstat(self.fd).st_size
            flat = np.frombuffer(mmap.mmap(self.fd, size), np.float32) if size else np.zeros(0, np.float32)
            self._slots = flat.reshape(self._num_slots, -1)
        return self._slots

    def close(self) -> None:
        """Closes the file descriptor. The memory is freed once no array refers to it."""
        os.close(self.fd)
        self._slots = None
