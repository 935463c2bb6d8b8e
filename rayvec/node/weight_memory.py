"""The published weights of one policy, in shared memory that the workers of a node read."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from rayvec.node.chunk_memory import MOST_CHUNKS

__all__ = ["WeightMemory"]

_SLOTS = MOST_CHUNKS + 1
"""One for each chunk that may be pending, and one for the weights that are published meanwhile."""
_ITEM_BYTES = 4


class WeightMemory:
    """Slots of one flat vector each. The first publication decides the size; a slot that is never used takes no memory.

    Args:
        fd: Of existing memory; new memory is made where it is left out. It is closed with this object.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("rayvec", os.MFD_CLOEXEC) if fd is None else fd
        self._slots: NDArray[np.float32] | None = None

    def write(self, weights: NDArray[np.float32], in_use: Collection[int | None]) -> int:
        """Copies weights, ``float32 [P]``, into a slot that is not in use; returns its number."""
        if self._slots is None:
            os.ftruncate(self.fd, _SLOTS * weights.size * _ITEM_BYTES)
        slot = next(slot for slot in range(_SLOTS) if slot not in in_use)
        self._map()[slot] = weights
        return slot

    def read(self, slot: int) -> NDArray[np.float32]:
        """Returns the weights in a slot, a view of ``float32 [P]``."""
        view: NDArray[np.float32] = self._map()[slot]
        return view

    def _map(self) -> NDArray[np.float32]:
        if self._slots is None:
            size = os.fstat(self.fd).st_size
            flat = np.frombuffer(mmap.mmap(self.fd, size), np.float32) if size else np.zeros(0, np.float32)
            self._slots = flat.reshape(_SLOTS, -1)
        return self._slots

    def close(self) -> None:
        """Closes the descriptor; the memory goes when the last array over it does."""
        os.close(self.fd)
        self._slots = None
