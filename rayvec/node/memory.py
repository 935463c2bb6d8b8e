"""The block of memory that a machine's fleet and its workers share: answers, actions, and a ring of commands for each.

A ring has two semaphores: one counts posted commands, the other counts answers. A step needs nothing else, because its
actions and results have rows in the block. What has no fixed size goes through the worker's pipe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data.layouts import ArrayLayout, Field
from rayvec.data.trees import Tree
from rayvec.fleet.commands import Autoreset, Command, Op
from rayvec.fleet.restarts import ENV_ARRAYS
from rayvec.node.chunk_slots import ChunkSlot
from rayvec.node.messages import receive
from rayvec.node.shared_memory import Semaphore, SharedBlock

__all__ = ["CHUNK_STEP_BITS", "ActionRows", "BlockSpec", "MachineBlock", "Ring", "action_leaves"]

CHUNK_STEP_BITS = 32
"""``chunk_step`` holds the number of a worker's chunk and, in this many low bits, the steps that it has taken."""

_ITEM_BYTES = 8
_OP, _MODE, _COUNT, _HAS_REST, _CODES = range(5)
"""Places in a slot of the ring. The codes of the actions' data types follow, then the rows."""
_ALL = -1
"""In place of a number of rows: all of them, in their order."""
_EXTRA_BYTES = 64
_MIN_SLOTS = 4
"""Two groups or two chunks, a call, and the end may be pending, or each environment by itself."""


class ActionRows:
    """Rows of actions in shared memory, in the caller's data type.

    An environment computes with the action's data type, so the transport must preserve it. Each row of a leaf is
    therefore a run of bytes wide enough for any data type, and the command carries the data type.

    Args:
        raw: The bytes of all rows, ``uint8 [N, row_bytes]``.
        shape: Shape of one action.
    """

    def __init__(self, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
        self._raw = raw
        self._shape = shape
        self._items = math.prod(shape)
        self._views: dict[str, NDArray[Any]] = {}

    def view(self, char: str) -> NDArray[Any]:
        """Returns the rows as an array ``[N, *shape]`` of the data type with NumPy character code `char`."""
        view = self._views.get(char)
        if view is None:
            dtype = np.dtype(char)
            view = self._raw[:, : self._items * dtype.itemsize].view(dtype).reshape(len(self._raw), *self._shape)
            self._views[char] = view
        return view


def action_leaves(actions: Tree, layout: ArrayLayout | None, count: int) -> list[NDArray[Any]] | None:
    """Returns the arrays of `count` actions, or None if :class:`ActionRows` can't hold them without conversion."""
    if layout is None or isinstance(actions, list) or (isinstance(actions, np.ndarray) and actions.dtype.hasobject):
        return None
    leaves = [np.asarray(leaf) for leaf in layout.flatten(actions)]
    for leaf, (_, shape) in zip(leaves, layout.leaves, strict=True):
        dtype = leaf.dtype
        fits = dtype.kind in "biuf" and dtype.itemsize <= _ITEM_BYTES and dtype.isnative
        if leaf.shape != (count, *shape) or not fits:
            return None
    return leaves


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
        arrays: ``obs`` and those of `ENV_ARRAYS`. Leaves of the observations that are objects belong to this process.
        slots: Memory for chunks, by the numbers of the slots.
        row_bytes: What one step of one environment takes in a chunk, with room for what a policy records.
    """

    def __init__(self, spec: BlockSpec, fd: int | None = None) -> None:
        self.spec, self._is_new = spec, fd is None
        self.layout = ArrayLayout.with_objects(spec.observation)
        self.action_layout = ArrayLayout.of_actions(spec.action)
        num_envs, num_workers = spec.bounds[-1], len(spec.bounds) - 1
        max_rows = int(np.diff(spec.bounds).max())
        self.num_slots = max_rows + _MIN_SLOTS
        leaves = self.action_layout.leaves
        of_obs = [field for place, field in enumerate(self.layout.leaves) if place not in self.layout.objects]
        items = sum(math.prod(shape) for _, shape in leaves)
        self.row_bytes = _EXTRA_BYTES + items * _ITEM_BYTES
        self.row_bytes += sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in of_obs)
        fields: dict[str, Field] = {
            "go": (np.uint8, (num_workers, Semaphore.SIZE)),
            "done": (np.uint8, (num_workers, Semaphore.SIZE)),
            "ring": (np.int64, (num_workers, self.num_slots, _CODES + len(leaves) + max_rows)),
            "has_rest": (np.bool_, (num_workers, self.num_slots)),
            "progress": (np.int64, (num_workers,)),
            "chunk_step": (np.int64, (num_workers,)),
            "cut_chunk": (np.int64, (num_workers,)),
            **{name: (dtype, (num_envs,)) for name, dtype in ENV_ARRAYS.items()},
            **self.layout.fields("obs", (num_envs,)),
        }
        for i, (_, shape) in enumerate(leaves):
            fields[f"act.{i}"] = (np.uint8, (num_envs, max(1, math.prod(shape)) * _ITEM_BYTES))
        self.block = SharedBlock(fields, fd)
        found = self.block.arrays
        objects = {f"obs.{i}": np.full(num_envs, None) for i in self.layout.objects}
        self.arrays: dict[str, Any] = {name: found[name] for name in ENV_ARRAYS}
        self.arrays["obs"] = self.layout.select({**found, **objects}, "obs")
        self.slots: dict[int, ChunkSlot] = {}

    def ring(self, index: int) -> Ring:
        """Returns one end of a worker's ring."""
        return Ring(self, index, initialise=self._is_new)

    def close(self) -> None:
        """Closes the file descriptor. The memory is freed once no array refers to it."""
        for slot in self.slots.values():
            slot.close()
        self.block.close()
        self.arrays, self.slots = {}, {}


class Ring:
    """One end of the ring of commands of a worker. Each end counts commands by itself.

    Args:
        block: The block.
        index: Index of the worker.
        initialise: Whether this end initialises the semaphores.

    Attributes:
        slot: The place in the ring where this end writes or reads a command next.
    """

    def __init__(self, block: MachineBlock, index: int, *, initialise: bool) -> None:
        arrays, bounds = block.block.arrays, block.spec.bounds
        self.rows = slice(bounds[index], bounds[index + 1])
        self._layout, self._num_slots = block.action_layout, block.num_slots
        self._ring, self.has_rest = arrays["ring"][index], arrays["has_rest"][index]
        self.progress = arrays["progress"][index : index + 1]
        self._all_rows = np.arange(self.rows.stop - self.rows.start)
        self._rows_at = _CODES + len(self._layout.leaves)
        shapes = [shape for _, shape in self._layout.leaves]
        self._actions = [ActionRows(arrays[f"act.{i}"][self.rows], shape) for i, shape in enumerate(shapes)]
        addresses = [block.block.address(name, index) for name in ("go", "done")]
        self.go, self.done = (Semaphore(address, initialise=initialise) for address in addresses)
        self.slot = 0
        self._known_rows, self._is_all = self._all_rows, True
        self._known_actions: tuple[Any, Any] = (None, None)
        self._heads: dict[tuple[int, ...], NDArray[np.int64]] = {}

    def advance(self) -> None:
        """Goes on to the slot of the next command."""
        self.slot = (self.slot + 1) % self._num_slots

    def write(self, command: Command) -> Any:
        """Writes a command into the present slot. Returns what goes through the pipe; None, if nothing does."""
        leaves: Sequence[NDArray[Any]] = ()
        rest, count = command.rest, len(command.rows)
        if command.op == Op.STEP:
            fitting = self._fitting(command.actions, count)
            rest, leaves = (command.actions, ()) if fitting is None else (None, fitting)
        if command.rows is not self._known_rows:  # a fleet passes the same array again
            self._known_rows = command.rows
            self._is_all = np.array_equal(command.rows, self._all_rows)
        for actions, leaf in zip(self._actions, leaves, strict=False):
            actions.view(leaf.dtype.char)[slice(None) if self._is_all else command.rows] = leaf
        codes = [ord(leaf.dtype.char) for leaf in leaves]
        head = command.op, command.mode, _ALL if self._is_all else count, rest is not None, *codes
        row = self._ring[self.slot]
        row[: len(head)] = self._head(head)
        if not self._is_all:
            row[self._rows_at : self._rows_at + count] = command.rows
        return rest

    def _head(self, head: tuple[int, ...]) -> NDArray[np.int64]:
        known = self._heads.get(head)
        if known is None:
            known = self._heads[head] = np.array(head, np.int64)
        return known

    def _fitting(self, actions: Tree, count: int) -> list[NDArray[Any]] | None:
        """Returns the leaves of actions that their rows can hold; None if they can't."""
        if type(actions) is np.ndarray and (actions.dtype, actions.shape) == self._known_actions:
            return [actions]
        leaves = action_leaves(actions, self._layout, count)
        if leaves is not None and type(actions) is np.ndarray:
            self._known_actions = actions.dtype, actions.shape
        return leaves

    def read(self, pipe: Connection) -> Command:
        """Reads the command of the present slot. Actions are copied: environments may keep a reference to them."""
        row = self._ring[self.slot]
        op, mode, count, has_rest, *codes = row[: self._rows_at].tolist()
        rows = self._all_rows if count == _ALL else row[self._rows_at : self._rows_at + count].copy()
        rest = receive(pipe).load() if has_rest else None
        actions: Tree = None
        if op == Op.STEP and has_rest:
            actions, rest = rest, None
        elif op == Op.STEP:
            pairs = zip(self._actions, codes, strict=True)
            select = slice(None) if count == _ALL else rows
            actions = self._layout.tree([each.view(chr(code))[select].copy() for each, code in pairs])
        return Command(Op(op), rows, actions, Autoreset(mode), rest)
