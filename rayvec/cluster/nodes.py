"""What a node is to the driver: the environments and policies of one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import ChunkSummary, NodeSlice, RolloutTimes, StepBatch, Tree
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError
from rayvec.pools.base import Autoreset
from rayvec.pools.restarts import NodeState

__all__ = ["Node", "NodePart", "Wait", "Weights", "done", "node_lost"]

Wait = Callable[[float | None], Any]
"""Waits for something that was started, for up to so many seconds, and returns its result.

It raises ``NotReady`` if that takes longer, ``NodeLostError`` if the node is gone."""


class Weights(NamedTuple):
    """Published weights of a policy.

    Attributes:
        version: Of the weights.
        array: ``float32 [P]``.
        ref: To the array in the object store, from which other nodes fetch it; None where there is no other node.
    """

    version: int
    array: NDArray[np.float32]
    ref: Any


class NodePart(NamedTuple):
    """A node's part of a chunk.

    Attributes:
        times: Of each of its workers.
        notes: What the driver logs, such as which workers and environments were restarted.
        summary: Of its part, where that stays in the object store.
        chunk: A reference to its part if there is a summary; else a chunk from each of its workers. Those may be views
            of memory that the chunk after the next one overwrites.
    """

    times: tuple[RolloutTimes, ...]
    notes: list[str]
    summary: ChunkSummary | None
    chunk: Any


class Node(Protocol):
    """The environments of one node, stepped as an :class:`~rayvec.pools.base.EnvPool` with ids from 0, and policies.

    What a method starts and returns a :data:`Wait` for is done in the order in which it was started.
    """

    slice: NodeSlice
    transport: str

    def start(self, factory: EnvFactory) -> Wait:
        """Starts the workers, which make their environments; the result is their spaces."""
        ...

    def allocate(self, observation: Space[Any], action: Space[Any], state: NodeState | None = None) -> Wait:
        """Makes the shared memory for these spaces, and resumes from the state of a lost node if there is one."""
        ...

    @property
    def event_fd(self) -> int:
        """Readable when some answer may be ready; for who calls :meth:`ready_ids`."""
        ...

    def ready_ids(self) -> NDArray[np.int64]:
        """Returns the ids whose answers :meth:`recv` would return without waiting; to be called repeatedly."""
        ...

    def send(self, env_ids: NDArray[np.int64], actions: Tree, autoreset: Autoreset) -> None:
        """Starts a step."""
        ...

    def reset(
        self, env_ids: NDArray[np.int64], seeds: Sequence[int | None], options: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a reset."""
        ...

    def ready(self, env_ids: NDArray[np.int64], *, begin: bool = True) -> None:
        """Asks for current observations."""
        ...

    def flush(self) -> None:
        """Sends the node what was started, if it has not been sent yet."""
        ...

    def recv(self, env_ids: NDArray[np.int64], *, timeout_s: float | None = None) -> StepBatch:
        """Waits for what was started, and has been sent."""
        ...

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], env_ids: NDArray[np.int64]
    ) -> Callable[[float | None], list[Any]]:
        """Starts a call of the environments' methods."""
        ...

    def set_attr(self, name: str, values: Sequence[Any], env_ids: NDArray[np.int64]) -> None:
        """Sets an attribute of environments."""
        ...

    def load(self, key: int, policy: bytes, version: int) -> Wait:
        """Gives every worker a pickled policy that brings weights of a version along."""
        ...

    def drop(self, key: int) -> Wait:
        """Lets every worker forget a policy and its weights."""
        ...

    def publish(self, key: int, weights: Weights) -> Wait:
        """Gives a policy new weights, with which every chunk acts that is begun after this."""
        ...

    def begin_rollout(self, key: int, num_steps: int, first_step: int, noise_seed: int, by_reference: bool) -> Wait:
        """Lets every worker take steps with a policy over its own slice; the result is a :class:`NodePart`."""
        ...

    def worker_pids(self) -> list[int]:
        """Process ids of what started the workers and ends with them, and of the workers."""
        ...

    def close(self, timeout_s: float | None = None) -> Wait:
        """Closes the environments and ends the workers; what has not ended in time is killed."""
        ...


def done(timeout_s: float | None) -> None:
    """The wait for what is done already."""


def node_lost(node_slice: NodeSlice, error: BaseException) -> NodeLostError:
    """Describes that a node is gone."""
    reason = str(error).splitlines()[0] if str(error) else "no reason given"
    return NodeLostError(
        "A node holds its environments until the pool is closed.",
        expected=f"node {node_slice.name} to answer",
        got=f"{type(error).__name__}: {reason}",
        remedy="Look into the node's log for what ended it; on_node_loss='rehost' resumes on the nodes that remain.",
    )
