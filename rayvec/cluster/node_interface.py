"""The driver's interface to a node: the environments and policies of one machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import (
    Chunk,
    ChunkRef,
    ChunkRequest,
    ChunkSummary,
    NodeSlice,
    Rollout,
    RolloutTimes,
    StepBatch,
    Topology,
    Tree,
)
from rayvec.data.join_chunks import join_chunks, join_summaries, summarize
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, NodeLostError, first_line
from rayvec.pools.base import Autoreset, PoolSpaces
from rayvec.pools.ids_by_owner import Part
from rayvec.pools.restart_state import NodeState

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


class Node(Protocol):
    """The environments and policies of one node.

    The environments are stepped as in an :class:`~rayvec.pools.base.EnvPool`, with ids from 0. A node runs operations
    that return a :data:`Wait` in the order in which they were started.
    """

    slice: NodeSlice
    transport: str

    def wait_until_placed(self, timeout_s: float) -> None:
        """Waits until the node's cores are reserved.

        Raises:
            NodeLostError: They were not reserved in time.
        """
        ...

    def start(self, factory: EnvFactory) -> Wait:
        """Starts the workers, which create their environments; the result is their spaces."""
        ...

    def allocate(self, observation: Space[Any], action: Space[Any], state: NodeState | None = None) -> Wait:
        """Allocates the shared memory for these spaces; with `state`, resumes from the state of a lost node."""
        ...

    @property
    def event_fds(self) -> Sequence[int]:
        """File descriptors of which one is readable once an answer may have come; then call :meth:`completed_ids`."""
        ...

    def completed_ids(self) -> NDArray[np.int64]:
        """Returns the ids whose answers have arrived; may be called repeatedly."""
        ...

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """Starts a step of some environments."""
        ...

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a reset of some environments."""
        ...

    def begin_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """Starts a reset of those environments that are between two episodes."""
        ...

    def observe(self, env_ids: NDArray[np.int64]) -> None:
        """Requests current observations."""
        ...

    def flush(self) -> None:
        """Sends any started request that has not been sent yet."""
        ...

    def wait(self, env_ids: NDArray[np.int64], deadline: float) -> None:
        """Waits until the answers of requests that have been sent have arrived; they stay for :meth:`take`."""
        ...

    def take(self, env_ids: NDArray[np.int64]) -> StepBatch:
        """Returns answers that have arrived."""
        ...

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """Starts a call of a method of some environments."""
        ...

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """Sets an attribute of some environments, one value for each."""
        ...

    def load(self, key: int, policy: bytes, version: int, on_node: bool) -> Wait:
        """Loads a pickled policy; the arguments are those of :meth:`rayvec.pools.base.Acting.load`."""
        ...

    def drop(self, key: int) -> Wait:
        """Removes a policy and its weights from every worker."""
        ...

    def begin_rollout(self, key: int, weights: Weights | None, request: ChunkRequest) -> Wait:
        """Starts a chunk: every worker steps its own slice with a policy. The result is a :class:`NodePart`.

        Args:
            key: The key of the policy.
            weights: The weights to act with; None for those that the policy was loaded with.
            request: How many steps, which noise, and whether the part stays in the object store.
        """
        ...

    def release_chunk(self) -> None:
        """Forgets the oldest pending chunk, whose part has been taken."""
        ...

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the workers' parent (the fork server or the actor) and of the workers."""
        ...

    def close(self, timeout_s: float | None = None) -> Wait:
        """Closes the environments and stops the workers; kills processes that do not exit in time."""
        ...


Request = Callable[[Node, Part], None]
"""Requests something from a node, for a part of its environments."""


@dataclass(slots=True)
class Member:
    """A node and its pending requests.

    Attributes:
        node: The node; another one takes its place if it is lost.
        pending: Each request, with the part of the environments that it is for. A replacement node repeats it.
    """

    node: Node
    pending: list[tuple[Part, Request]] = field(default_factory=list)

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


def describe_nodes(nodes: Sequence[Node], *, merge: bool) -> tuple[Topology, tuple[str, ...]]:
    """Returns which node holds which environments, and how each of these nodes is reached.

    Args:
        nodes: In the order of their environments.
        merge: Whether adjoining environments of one node are one slice.
    """
    slices: list[NodeSlice] = []
    transports: list[str] = []
    for node in nodes:
        part = node.slice
        if merge and slices and slices[-1].node_id == part.node_id:
            bounds = slices[-1].worker_bounds + part.worker_bounds[1:]
            slices[-1] = replace(part, worker_bounds=bounds, num_cpus=slices[-1].num_cpus + part.num_cpus)
        else:
            slices.append(part)
            transports.append(node.transport)
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
