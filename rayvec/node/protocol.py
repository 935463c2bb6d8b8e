"""The messages between a node's pool and its workers; what has a fixed size is in `rayvec.node.step_memory`."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from rayvec.errors import RemoteFailure
from rayvec.node.step_memory import BlockShape

__all__ = ["Op", "Reply", "Setup", "WeightsRef"]


class Op(IntEnum):
    """The operation of a command in the ring."""

    STEP = 0
    """Step these rows with the actions in the block."""
    STEP_OBJECTS = 1
    """Step these rows with the actions that follow in the pipe."""
    RESET = 2
    """Reset these rows with the seeds and options that follow in the pipe."""
    BEGIN = 3
    """Reset the rows that are between two episodes."""
    OBSERVE = 4
    """Do nothing. The pool reads the current observations of these rows."""
    CALL = 5
    """Call a method of the worker. Its name and arguments follow in the pipe."""


class Reply(NamedTuple):
    """A message about a completed command. The worker sends it only if the arrays don't hold the whole result.

    Attributes:
        value: The return value of a call. For a step or reset, a tuple of :class:`~rayvec.data.RawInfo`.
        failures: Pairs of an environment's row within the worker and the failure. Row -1 stands for all rows.
        objects: Observations of the command's rows, if observations are objects.
        notes: Messages about restarted environments for the log.
    """

    value: Any = ()
    failures: tuple[tuple[int, RemoteFailure], ...] = ()
    objects: tuple[Any, ...] | None = None
    notes: tuple[str, ...] = ()


class Setup(NamedTuple):
    """The message that sets up a worker once the pool knows the spaces of all environments.

    The file descriptors of the block and of the chunk memory come with it.

    Attributes:
        shape: Parameters of the block.
        first_command: Number of the worker's first command. A previous worker completed the commands before it.
        num_policies: Number of policies that follow, one message each.
        first_id: Global index of the node's first environment.
    """

    shape: BlockShape
    first_command: int = 0
    num_policies: int = 0
    first_id: int = 0


class WeightsRef(NamedTuple):
    """A reference to the weights that a policy acts with.

    Attributes:
        version: Version of the weights.
        slot: Slot of the policy's :class:`~rayvec.node.weight_memory.WeightMemory`. None means the weights that the
            pickled policy contains.
    """

    version: int
    slot: int | None = None
