"""The block of memory that a machine's fleet and its workers share: answers, actions, and chunks of steps.

It is one anonymous file. Its beginning has a row for each environment, which holds the last answer and the actions of
the next step. Chunks follow in slots: the workers write their columns of the same arrays ``[T, N, ...]``. A slot begins
with the weights that the policy acts with. An array that a slot has no room for, or that holds objects, travels with
the worker's answer.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from numpy.typing import DTypeLike, NDArray

from rayvec.data import Chunk
from rayvec.data.chunk import map_steps
from rayvec.data.trees import ArrayLayout, Field, Tree
from rayvec.fleet.restarts import ENV_ARRAYS
from rayvec.node.shared_memory import anonymous_file

CHUNK_STEP_BITS = 32
"""``chunk_step`` holds the number of a worker's chunk and, in this many low bits, the steps that it has taken."""
_SLOT_BITS = 40
"""Slot k begins at byte ``(k + 1) << _SLOT_BITS``: the file takes memory only for pages that were written."""
_EXTRA_BYTES = 4096
"""Room in a chunk for what a policy records of a step of an environment."""
_ITEM_BYTES = 8
_ALIGN_BYTES = 64
_WEIGHT_BYTES = 4


def _aligned(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to the alignment of arrays in shared memory."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def action_leaves(actions: Tree, layout: ArrayLayout | None, count: int) -> list[NDArray[Any]] | None:
    """Returns the arrays of `count` actions, or None if the block can't hold them without conversion."""
    if layout is None or isinstance(actions, list) or (isinstance(actions, np.ndarray) and actions.dtype.hasobject):
        return None
    leaves = [np.asarray(leaf) for leaf in layout.flatten(actions)]
    for leaf, (_, shape) in zip(leaves, layout.leaves, strict=True):
        dtype = leaf.dtype
        fits = dtype.kind in "biuf" and dtype.itemsize <= _ITEM_BYTES and dtype.isnative
        if leaf.shape != (count, *shape) or not fits:
            return None
    return leaves


class ChunkPlace(NamedTuple):
    """Where the workers of a machine write a chunk.

    Attributes:
        number: Number of the chunk, from 1.
        slot: Number of the slot.
        num_bytes: Size of the slot.
        first_row: The machine's row of the chunk's first column.
        num_envs: N, of all workers that take the chunk.
        num_weights: P; 0 for a policy that keeps its weights.
    """

    number: int
    slot: int
    num_bytes: int
    first_row: int
    num_envs: int
    num_weights: int


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What the arrays of a block follow from.

    Attributes:
        observation: Observation space of one environment.
        action: Action space of one environment.
        bounds: Worker k holds the rows ``bounds[k]`` to ``bounds[k + 1] - 1``.
    """

    observation: Space[Any]
    action: Space[Any]
    bounds: tuple[int, ...]


class MachineBlock:
    """The shared block. The fleet and each worker hold one object of this class.

    Args:
        spec: Determines the arrays.
        fd: File descriptor of an existing block, which this object owns; None creates a new one.

    Attributes:
        file: The block.
        arrays: ``obs`` and those of `ENV_ARRAYS`. Leaves of the observations that are objects belong to this process.
        by_worker: ``progress``, ``chunk_step`` and ``cut_chunk``, with one number for each worker.
        row_bytes: What one step of one environment takes in a chunk.
    """

    def __init__(self, spec: BlockSpec, fd: int | None = None) -> None:
        self.spec = spec
        self.layout = ArrayLayout.of(spec.observation)
        self.action_layout = ArrayLayout.of_actions(spec.action)
        num_envs, num_workers = spec.bounds[-1], len(spec.bounds) - 1
        of_obs = self.layout.fields("obs", (num_envs,))
        act_bytes = [max(1, math.prod(shape)) * _ITEM_BYTES for _, shape in self.action_layout.leaves]
        fields: dict[str, Field] = {
            **{name: (dtype, (num_envs,)) for name, dtype in ENV_ARRAYS.items()},
            **of_obs,
            **{name: (np.int64, (num_workers,)) for name in ("progress", "chunk_step", "cut_chunk")},
            **{f"act.{i}": (np.uint8, (num_envs, num_bytes)) for i, num_bytes in enumerate(act_bytes)},
        }
        sizes = {name: _aligned(math.prod(shape) * np.dtype(dtype).itemsize) for name, (dtype, shape) in fields.items()}
        total = sum(sizes.values())
        self.row_bytes = _EXTRA_BYTES + sum(act_bytes) + sum(sizes[name] for name in of_obs) // num_envs
        self.file = open(anonymous_file("rayvec", total) if fd is None else fd, "rb+", 0)
        memory, start = mmap.mmap(self.file.fileno(), total), 0
        found: dict[str, NDArray[Any]] = {}
        for name, (dtype, shape) in fields.items():
            found[name] = np.ndarray(shape, dtype, memory, start)
            start += sizes[name]
        objects = {f"obs.{i}": np.full(num_envs, None) for i in self.layout.objects}
        self.arrays: dict[str, Any] = {name: found[name] for name in ENV_ARRAYS}
        self.arrays["obs"] = self.layout.select({**found, **objects}, "obs")
        self.by_worker = {name: found[name] for name in ("progress", "chunk_step", "cut_chunk")}
        self._actions = [(found[f"act.{i}"], shape) for i, (_, shape) in enumerate(self.action_layout.leaves)]
        self._slots: dict[int, NDArray[np.uint8]] = {}

    def actions(self, codes: Sequence[str]) -> list[NDArray[Any]]:
        """Returns the rows of each leaf of the actions ``[N, *shape]``, in data types given by NumPy's codes."""
        return [
            raw[:, : math.prod(shape) * np.dtype(code).itemsize].view(code).reshape(len(raw), *shape)
            for (raw, shape), code in zip(self._actions, codes, strict=True)
        ]

    def slot(self, place: ChunkPlace) -> NDArray[np.uint8]:
        """Returns the bytes of the slot of a chunk. Arrays in an earlier mapping stay valid."""
        found = self._slots.get(place.slot)
        if found is None or len(found) < place.num_bytes:
            start = (place.slot + 1) << _SLOT_BITS
            # Lengthens the file. Unlike a truncation it can't cut a slot that another process adds meanwhile.
            os.posix_fallocate(self.file.fileno(), start + place.num_bytes - 1, 1)
            found = np.frombuffer(mmap.mmap(self.file.fileno(), place.num_bytes, offset=start), np.uint8)
            self._slots[place.slot] = found
        return found

    def close(self) -> None:
        """Closes the file. The memory is freed once no array refers to it."""
        self.file.close()
        self.arrays, self.by_worker, self._actions, self._slots = {}, {}, [], {}


@dataclass(frozen=True, slots=True)
class _Placed:
    """An array of a chunk, as it lies in a slot."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class ChunkColumns:
    """A worker's columns of a chunk, in a slot.

    Args:
        block: The block.
        place: What the machine's fleet says of the chunk.
        rows: The machine's rows of the worker's environments.

    Attributes:
        weights: The weights that the policy acts with, ``float32 [P]``.
    """

    def __init__(self, block: MachineBlock, place: ChunkPlace, rows: slice = slice(0, 0)) -> None:
        self._slot, self._num_envs = block.slot(place), place.num_envs
        self._columns = slice(rows.start - place.first_row, rows.stop - place.first_row)
        self.weights = self._slot[: place.num_weights * _WEIGHT_BYTES].view(np.float32)
        self._next = _aligned(self.weights.nbytes)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Allocates the worker's columns ``[T, n, ...]`` of an array ``[T, N, ...]``."""
        dtype, whole = np.dtype(dtype), (shape[0], self._num_envs, *shape[2:])
        start, num_bytes = self._next, dtype.itemsize * math.prod(whole)
        self._next += _aligned(num_bytes)
        if dtype.hasobject or self._next > len(self._slot):
            return np.empty(shape, dtype)
        return self._slot[start : start + num_bytes].view(dtype).reshape(whole)[:, self._columns]

    def pack(self, chunk: Chunk) -> Chunk:
        """Returns a chunk with the places of its arrays in the slot instead of these."""
        base = self._slot.ctypes.data

        def place(array: NDArray[Any]) -> Any:
            offset = array.ctypes.data - base
            is_here = 0 <= offset < len(self._slot)
            return _Placed(offset, array.dtype, array.shape, array.strides) if is_here else array

        return map_steps(place, chunk)

    def unpack(self, chunk: Chunk) -> Chunk:
        """Returns the chunk that a worker has packed. Its arrays are views of the slot."""

        def read(each: Any) -> Any:
            if not isinstance(each, _Placed):
                return each
            return np.ndarray(each.shape, each.dtype, self._slot, each.offset, each.strides)

        return map_steps(read, chunk)
