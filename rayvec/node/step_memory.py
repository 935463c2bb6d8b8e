"""The block of memory that a node's pool and its workers share: commands, actions, observations, rewards and counters.

For each worker, the block holds a ring of commands and two semaphores. One counts posted commands, the other counts
completed commands. A step needs nothing else, because its actions and results have rows in the block. Data without a
fixed size goes through the worker's pipe, see `rayvec.node.protocol`. An event next to the block wakes a thread that
waits for any of the workers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import Tree
from rayvec.data.layouts import ArrayLayout, Field, index_tree
from rayvec.node.memory import ActionRows, action_leaves
from rayvec.node.shared_memory import Semaphore, SharedBlock
from rayvec.pools.restart_state import ENV_ARRAYS

__all__ = ["ActionRows", "BlockShape", "NodeBlock", "Unknown", "action_leaves"]

_ITEM_BYTES = 8
OP, AUTORESET, COUNT, ROWS_AT, DTYPES = 0, 1, 2, 3, 4
"""Places in a command; the rows that it names are in an array of their own, from the place `ROWS_AT` says."""
FIRST_ROWS = -1
"""In place of such a place: the rows are the first ones, in their order, as in most steps."""

CHUNK_STEP_BITS = 32
"""``chunk_step`` holds the number of a worker's chunk and, in this many low bits, the steps that it has taken."""


class Unknown(Enum):
    """Stands for an observation that a worker does not know yet, where observations are objects."""

    OBS = "obs"


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The parameters that determine the arrays of a node's block.

    Attributes:
        observation: Observation space of one environment.
        action: Action space of one environment.
        worker_bounds: Local indices: worker k holds ``range(worker_bounds[k], worker_bounds[k + 1])``.
        sub_batches: Number of environments of each native sub-batch. Empty for ordinary environments.
    """

    observation: Space[Any]
    action: Space[Any]
    worker_bounds: tuple[int, ...]
    sub_batches: tuple[int, ...] = ()

    @property
    def num_workers(self) -> int:
        """The number of workers that share the block."""
        return len(self.worker_bounds) - 1

    @property
    def num_envs(self) -> int:
        """The number of environments on the node."""
        return self.worker_bounds[-1]

    @property
    def most_units(self) -> int:
        """The most environments, or native sub-batches, that one worker holds: a command names each of them."""
        bounds = np.array(self.worker_bounds)
        if self.sub_batches:
            bounds = np.searchsorted(np.cumsum([0, *self.sub_batches]), bounds)
        return int(np.diff(bounds).max())


class NodeBlock:
    """The shared block of a node. The pool and each worker hold one object of this class.

    Args:
        shape: Parameters that determine the arrays.
        fds: File descriptors of an existing block and its event. None creates a new block and event.
    """

    def __init__(self, shape: BlockShape, fds: tuple[int, int] | None = None) -> None:
        n, workers = shape.num_envs, shape.num_workers
        self.shape = shape
        self.layout = ArrayLayout.of(shape.observation)
        self.action_layout = ArrayLayout.of(shape.action)
        largest = shape.most_units
        num_leaves = len(self.action_layout.leaves) if self.action_layout else 0
        self.depth = largest + 2
        fields: dict[str, Field] = {
            "go": (np.uint8, (workers, Semaphore.SIZE)),
            "done": (np.uint8, (workers, Semaphore.SIZE)),
            "wants_event": (np.bool_, (1,)),
            "ring": (np.int64, (workers, self.depth, DTYPES + num_leaves)),
            "rows": (np.int64, (workers, 4 * largest)),  # pending commands name each row once, and wrap around once
            "has_reply": (np.bool_, (workers, self.depth)),
            **{name: (dtype, (n,)) for name, dtype in ENV_ARRAYS.items()},
            "pid": (np.int64, (workers,)),
            "progress": (np.int64, (workers,)),
            "chunk_step": (np.int64, (workers,)),
            "cut_chunk": (np.int64, (workers,)),
        }
        if self.layout is not None:
            fields |= self.layout.fields("obs", (n,))
        if self.action_layout is not None:
            for i, (_, leaf_shape) in enumerate(self.action_layout.leaves):
                fields[f"act.{i}"] = (np.uint8, (n, max(1, math.prod(leaf_shape)) * _ITEM_BYTES))
        self.block = SharedBlock(fields, None if fds is None else fds[0])
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fds is None else fds[1]
        self.arrays = self.block.arrays
        self.obs: Tree = None if self.layout is None else self.layout.select(self.arrays, "obs")
        self._action_rows = self.actions(slice(None))
        addresses = [(self.block.address("go", k), self.block.address("done", k)) for k in range(workers)]
        self.go = [Semaphore(go, initialise=fds is None) for go, _ in addresses]
        self.done = [Semaphore(done, initialise=fds is None) for _, done in addresses]

    @property
    def fds(self) -> tuple[int, int]:
        """The file descriptors of the block and of the event that signals completed commands."""
        return self.block.fd, self.event_fd

    def forget(self, worker: int) -> None:
        """Reinitialises a worker's semaphores after the worker has exited."""
        self.go[worker].initialise()
        self.done[worker].initialise()

    def actions(self, rows: slice) -> list[ActionRows]:
        """Returns the action rows of each leaf for the environments in `rows`."""
        if self.action_layout is None:
            return []
        return [
            ActionRows(self.arrays[f"act.{i}"][rows], leaf_shape)
            for i, (_, leaf_shape) in enumerate(self.action_layout.leaves)
        ]

    def write_actions(self, select: slice | NDArray[np.int64], actions: Tree, count: int) -> list[int] | None:
        """Writes the actions of `count` environments into their rows.

        Returns:
            The codes of their data types, for the command; None if the actions don't fit and nothing was written.
        """
        leaves = action_leaves(actions, self.action_layout, count)
        if leaves is None:
            return None
        for rows, leaf in zip(self._action_rows, leaves, strict=True):
            rows.view(leaf.dtype.char)[select] = leaf
        return [ord(leaf.dtype.char) for leaf in leaves]

    def results(self, rows: slice) -> Mapping[str, Any]:
        """Returns the arrays, restricted to `rows`, into which a worker writes its results."""
        arrays = {name: self.arrays[name][rows] for name in ENV_ARRAYS}
        if self.layout is None:
            return arrays | {"obs": np.full(len(arrays["rew"]), Unknown.OBS, dtype=object)}
        return arrays | {"obs": index_tree(self.obs, rows)}

    def close(self) -> None:
        """Closes the file descriptors."""
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1
        self.block.close()
        self.arrays, self.obs = {}, None
