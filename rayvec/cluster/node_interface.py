"""The driver's interface to a node: the environments and policies of one machine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayvec.data import (
    Chunk,
    ChunkRef,
    ChunkSummary,
    NodeSlice,
    Rollout,
    RolloutTimes,
    Topology,
)
from rayvec.data.join_chunks import join_chunks, join_summaries, summarize
from rayvec.errors import ConfigError, NodeLostError, first_line
from rayvec.pools.base import NotReady, PoolSpaces, seconds_until
from rayvec.pools.ids_by_owner import Part

if TYPE_CHECKING:
    from rayvec.cluster.local_node import LocalNode
    from rayvec.cluster.remote_node import RemoteNode

__all__ = [
    "Member",
    "Node",
    "NodePart",
    "Request",
    "Wait",
    "Weights",
    "check_sizes",
    "close_quietly",
    "describe_nodes",
    "done",
    "join_node_parts",
    "node_lost",
    "reading_others",
]

Wait = Callable[[float | None], Any]
"""Waits for a started operation and returns its result. The argument is a timeout in seconds, or None.

It raises ``NotReady`` if the timeout expires and ``NodeLostError`` if the node is lost."""


class Weights(NamedTuple):
    """Published weights of a policy.

    Attributes:
        version: Version of the weights.
        array: The weights, ``float32 [P]``.
        ref: Reference to the array in the object store, from which other nodes fetch it; None without other nodes.
    """

    version: int
    array: NDArray[np.float32]
    ref: Any


class NodePart(NamedTuple):
    """A node's part of a chunk.

    Attributes:
        times: Times of each of the node's workers.
        notes: Lines for the driver to log, such as which workers and environments were restarted.
        summary: Summary of the part if the part stays in the object store; else None.
        chunk: A reference to the part if there is a summary; else one chunk for each worker. These chunks may be views
            of memory that the chunk after the next one overwrites.
        replaced: How many workers were replaced since the part before, by kind; see
            :meth:`rayvec.pools.base.ActingPool.take_replaced`.
    """

    times: tuple[RolloutTimes, ...]
    notes: list[str]
    summary: ChunkSummary | None
    chunk: Any
    replaced: dict[str, int]


Node: TypeAlias = "LocalNode | RemoteNode"
"""The environments and policies of one node.

The environments are stepped as in an :class:`~rayvec.pools.base.EnvPool`, with ids from 0. A node runs operations that
return a :data:`Wait` in the order in which they were started.
"""


@contextlib.contextmanager
def reading_others(waits: Sequence[Wait], deadline: float = math.inf) -> Iterator[None]:
    """Reads the answers of the other nodes too if one raises: unread, they would be taken for those of later requests.

    It waits for them until the deadline. A lost node, and a timeout after which the caller waits again, read nothing.
    """
    try:
        yield
    except (NodeLostError, NotReady):
        raise
    except Exception:
        for wait in waits:
            with contextlib.suppress(Exception):
                wait(seconds_until(deadline))
        raise


Request: TypeAlias = "Callable[[Node, Part], None]"
"""Requests something from a node, for a part of its environments."""


@dataclass(slots=True)
class Member:
    """A node and its pending requests.

    Attributes:
        node: The node; another one takes its place if it is lost.
        place: Its slice, in environments, or in sub-batches if they are native. `node.slice` counts environments.
        pending: Each request, with the part of the environments that it is for. A replacement node repeats it.
        num_moves: How often these environments have started on another node.
    """

    node: Node
    place: NodeSlice
    pending: list[tuple[Part, Request]] = field(default_factory=list)
    num_moves: int = 0

    def repeat_pending(self) -> None:
        """Sends the pending requests to a replacement node."""
        for part, request in self.pending:
            request(self.node, part)
        self.node.flush()

    def forget(self, part: Part) -> None:
        """Removes some environments, which have answered, from the pending requests."""
        for position, (requested, _) in enumerate(self.pending):
            if requested is part:
                del self.pending[position]
                return
        left = [(requested.without(part), request) for requested, request in self.pending]
        self.pending = [(requested, request) for requested, request in left if len(requested.rows)]


def describe_nodes(members: Sequence[Member], *, merge: bool) -> tuple[Topology, tuple[str, ...]]:
    """Returns which node holds which environments, and how each of these nodes is reached.

    Args:
        members: In the order of their environments.
        merge: Whether adjoining environments of one node are one slice.
    """
    slices: list[NodeSlice] = []
    transports: list[str] = []
    for member in members:
        part = member.node.slice
        if merge and slices and slices[-1].node_id == part.node_id:
            bounds = slices[-1].worker_bounds + part.worker_bounds[1:]
            slices[-1] = replace(part, worker_bounds=bounds, num_cpus=slices[-1].num_cpus + part.num_cpus)
        else:
            slices.append(part)
            transports.append(member.node.transport)
    return Topology(tuple(slices)), tuple(transports)


def join_node_parts(parts: Sequence[NodePart], waited_s: float) -> Rollout:
    """Joins the parts of a chunk. Those that stay in the object store are joined by reference.

    Args:
        parts: In the order of their environments.
        waited_s: How long the chunk was waited for, in seconds.
    """
    chunk: Chunk | None = None
    refs: tuple[ChunkRef, ...] = ()
    if parts[0].summary is None:
        chunk = join_chunks([of_worker for part in parts for of_worker in part.chunk])
        summary = summarize(chunk)
    else:
        every = [part.summary for part in parts if part.summary is not None]
        summary = join_summaries(every)
        refs = tuple(ChunkRef(e.env_ids, e.num_steps, part.chunk) for e, part in zip(every, parts, strict=True))
    return Rollout(summary, chunk, refs, tuple(times for part in parts for times in part.times), waited_s)


def check_sizes(spaces: PoolSpaces, node_slice: NodeSlice, found: PoolSpaces) -> None:
    """Raises ``ConfigError`` if native sub-batches of a node that is started again have another size."""
    units = node_slice.env_range
    expected = spaces.sub_batches[units.start : units.stop]
    if found.sub_batches != expected:
        raise ConfigError(
            "A native sub-batch that is restarted has as many environments as before.",
            expected=list(expected),
            got=list(found.sub_batches),
            remedy="Let each callable return the same vector environment every time.",
        )


def close_quietly(node: Node, timeout_s: float) -> None:
    """Closes a node that may have ended."""
    with contextlib.suppress(Exception):
        node.close(timeout_s)(timeout_s)


def done(timeout_s: float | None) -> None:
    """A :data:`Wait` for a completed operation."""


def node_lost(node_slice: NodeSlice, error: BaseException) -> NodeLostError:
    """Returns the error for a lost node; `error` is the reason."""
    return NodeLostError(
        "A node holds its environments until the pool is closed.",
        expected=f"node {node_slice.name} to answer",
        got=f"{type(error).__name__}: {first_line(error)}",
        remedy="Look into the node's log for what ended it; on_node_loss='rehost' resumes on the nodes that remain.",
    )
