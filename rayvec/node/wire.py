"""What a node's client and its workers agree on: the shared block and the messages in their pipes.

For each worker the block holds a ring of commands, one semaphore that says "there is a command" and one that
says "a command is done". A step needs nothing else: its actions and its results have their rows in the
block. What has no fixed size (infos, errors, the arguments of a call) follows through the worker's pipe. An
event beside the block wakes those who wait for whichever worker is first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import RawInfo, Tree
from rayvec.errors import RemoteFailure
from rayvec.pools.memory import ArrayLayout, Field, Semaphore, SharedBlock

__all__ = ["ActionRows", "BlockShape", "NodeBlock", "Op", "Reply", "Setup", "WeightsRef", "travels"]

_ITEM_BYTES = 8
OP, AUTORESET, COUNT, DTYPES = 0, 1, 2, 3


class Op(IntEnum):
    """What a command in the ring asks for."""

    STEP = 0
    """Step these rows with the actions in the block."""
    STEP_OBJECTS = 1
    """Step these rows with the actions that follow in the pipe."""
    RESET = 2
    """Reset these rows with the seeds and options that follow in the pipe."""
    READY = 3
    """Reset those of these rows that are between two episodes."""
    LOOK = 4
    """Do nothing: their observations are asked for."""
    CALL = 5
    """Call the worker's method that is named, with its arguments, by what follows in the pipe."""


class Reply(NamedTuple):
    """What follows a finished command in the pipe, where the arrays don't say it all.

    Attributes:
        value: What a call returned; of a step or reset, its tuple of :class:`~rayvec.data.RawInfo`.
        failures: Row within the worker, and what the environment raised.
        objects: Observations of the rows concerned, where they are no arrays.
        notes: What a log should tell of environments that were restarted.
    """

    value: Any = ()
    failures: tuple[tuple[int, RemoteFailure], ...] = ()
    objects: tuple[Any, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def infos(self) -> tuple[RawInfo, ...]:
        """The value of a step or reset."""
        return tuple(self.value)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """All that determines the arrays of a node's block.

    Attributes:
        observation: Space of one environment's observations.
        action: Space of one environment's actions.
        worker_bounds: Local indices: worker k holds ``range(worker_bounds[k], worker_bounds[k + 1])``.
    """

    observation: Space[Any]
    action: Space[Any]
    worker_bounds: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        """How many workers share the block."""
        return len(self.worker_bounds) - 1

    @property
    def num_envs(self) -> int:
        """How many environments the node holds."""
        return self.worker_bounds[-1]


class Setup(NamedTuple):
    """What a worker is told once the spaces of all are known; descriptors of the block and the chunk memory come along.

    Attributes:
        shape: Of the block.
        first_command: Number of the first command that is the worker's; an earlier worker did those before it.
        num_policies: How many policies follow, a message each.
    """

    shape: BlockShape
    first_command: int = 0
    num_policies: int = 0


class WeightsRef(NamedTuple):
    """Which weights a policy acts with.

    Attributes:
        version: Of the weights.
        slot: Of the policy's :class:`~rayvec.node.weight_memory.WeightMemory`; None for those it brought along.
    """

    version: int
    slot: int | None = None


class ActionRows:
    """Rows of actions in shared memory, in whatever data type the caller brings.

    An action must reach the environment in the data type that the caller gave it, since an environment
    computes with it. So a leaf's row is a run of bytes wide enough for any, and the data type travels
    with the command.
    """

    def __init__(self, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
        self._raw = raw
        self._shape = shape
        self._items = math.prod(shape)
        self._views: dict[str, NDArray[Any]] = {}

    def view(self, char: str) -> NDArray[Any]:
        """Returns the rows as an array ``[N, *shape]`` of the data type with this character code."""
        view = self._views.get(char)
        if view is None:
            dtype = np.dtype(char)
            view = self._raw[:, : self._items * dtype.itemsize].view(dtype).reshape(len(self._raw), *self._shape)
            self._views[char] = view
        return view


def travels(array: NDArray[Any], shape: tuple[int, ...]) -> bool:
    """Says whether a batch of actions fits into :class:`ActionRows` as it is."""
    dtype = array.dtype
    return array.shape[1:] == shape and dtype.kind in "biuf" and dtype.itemsize <= _ITEM_BYTES and dtype.isnative


class NodeBlock:
    """The shared block of a node, seen by its client and by its workers.

    Args:
        shape: What determines its arrays.
        fds: Of the existing block and its event; without them new ones are made.
    """

    def __init__(self, shape: BlockShape, fds: tuple[int, int] | None = None) -> None:
        n, workers = shape.num_envs, shape.num_workers
        bounds = shape.worker_bounds
        self.shape = shape
        self.layout = ArrayLayout.of(shape.observation)
        self.action_layout = ArrayLayout.of(shape.action)
        largest = max(bounds[k + 1] - bounds[k] for k in range(workers))
        num_leaves = len(self.action_layout.leaves) if self.action_layout else 0
        self.depth = largest + 2
        self.first_id_at = DTYPES + num_leaves
        fields: dict[str, Field] = {
            "go": (np.uint8, (workers, Semaphore.SIZE)),
            "done": (np.uint8, (workers, Semaphore.SIZE)),
            "wants_event": (np.bool_, (1,)),
            "head": (np.int64, (workers,)),
            "tail": (np.int64, (workers,)),
            "ring": (np.int64, (workers, self.depth, self.first_id_at + largest)),
            "has_reply": (np.bool_, (workers, self.depth)),
            "rew": (np.float64, (n,)),
            "terminated": (np.bool_, (n,)),
            "truncated": (np.bool_, (n,)),
            "seed": (np.uint64, (n,)),
            "has_seed": (np.bool_, (n,)),
            "restarts": (np.int64, (n,)),
            "cut": (np.bool_, (n,)),
            "started": (np.bool_, (n,)),
            "pid": (np.int64, (workers,)),
            "progress": (np.int64, (workers,)),
        }
        if self.layout is not None:
            fields |= self.layout.fields("obs", (n,))
        if self.action_layout is not None:
            for i, (_, leaf_shape) in enumerate(self.action_layout.leaves):
                fields[f"act.{i}"] = (np.uint8, (n, max(1, math.prod(leaf_shape)) * _ITEM_BYTES))
        self.block = SharedBlock(fields, None if fds is None else fds[0])
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fds is None else fds[1]
        self.arrays = self.block.arrays
        addresses = [(self.block.address("go", k), self.block.address("done", k)) for k in range(workers)]
        self.go = [Semaphore(go, initialise=fds is None) for go, _ in addresses]
        self.done = [Semaphore(done, initialise=fds is None) for _, done in addresses]

    @property
    def fds(self) -> tuple[int, int]:
        """File descriptors of the block and of the event that says that some command is done."""
        return self.block.fd, self.event_fd

    def forget(self, worker: int) -> None:
        """Sets up a worker's semaphores anew, after it has ended in the midst of things."""
        self.go[worker].initialise()
        self.done[worker].initialise()

    def actions(self, rows: slice) -> list[ActionRows]:
        """Returns the action rows of each leaf, for some environments."""
        if self.action_layout is None:
            return []
        return [
            ActionRows(self.arrays[f"act.{i}"][rows], leaf_shape)
            for i, (_, leaf_shape) in enumerate(self.action_layout.leaves)
        ]

    def results(self, rows: slice) -> Mapping[str, Any]:
        """Returns the arrays that a worker writes its results to, for its rows."""
        names = ("rew", "terminated", "truncated", "seed", "has_seed", "restarts", "cut", "started")
        arrays = {name: self.arrays[name][rows] for name in names}
        if self.layout is None:
            return arrays | {"obs": np.full(len(arrays["rew"]), None, dtype=object)}
        leaves: Sequence[Tree] = [self.arrays[f"obs.{i}"][rows] for i in range(len(self.layout.leaves))]
        return arrays | {"obs": self.layout.tree(leaves)}

    def close(self) -> None:
        """Gives the file descriptors back."""
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1
        self.block.close()
        self.arrays = {}
