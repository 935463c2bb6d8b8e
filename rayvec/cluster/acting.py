"""Policies on the nodes of a cluster: handed out, given new weights, and let act in the workers, a chunk at a time.

All of it goes through Ray, and an actor does what it is asked one thing after another. So weights that are
published while a chunk is under way wait behind it, without the driver, and the next chunk begins with them; and a
chunk that is asked for while one is under way begins on each node as soon as its part of that one has been handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

from rayvec.cluster.node_pools import NodeHandle
from rayvec.data import ChunkSummary, RolloutTimes
from rayvec.errors import NodeLostError
from rayvec.node.chunk_memory import MOST_CHUNKS

__all__ = ["ActingNodes", "NodePart"]


class _HasHandle(Protocol):
    handle: NodeHandle


class NodePart(NamedTuple):
    """What a node answers when its part of a chunk is taken.

    Attributes:
        times: Of each of its workers.
        notes: What a log should tell, such as which workers and environments were restarted.
        summary: Of its part, where that stays in the object store.
        chunk: A reference to its part if there is a summary; else its part, a chunk from each of its workers, maybe in
            memory that the next but one writes to.
    """

    times: tuple[RolloutTimes, ...]
    notes: list[str]
    summary: ChunkSummary | None
    chunk: Any


@dataclass(slots=True)
class _Flight:
    """A chunk under way.

    Attributes:
        key: Of the policy that acts.
        args: What the nodes were asked for.
        weights: Version of its weights and the reference to them when the chunk began; None for those that the policy
            brought along.
        asked: Of each node, who was asked, and the references to its answer and to its part of the chunk.
        publishing: Likewise of weights that were published after it had been asked for.
        parts: Answers so far, by the number of the node.
        waited_s: How long somebody has waited for them.
    """

    key: int
    args: tuple[Any, ...]
    weights: tuple[int, Any] | None
    asked: list[tuple[NodeHandle, tuple[Any, Any]]]
    publishing: list[tuple[NodeHandle, Any]] = field(default_factory=list)
    parts: dict[int, NodePart] = field(default_factory=dict)
    waited_s: float = 0.0

    def wait(self, number: int, deadline: float | None = None) -> NodePart:
        """Waits for the answer of a node, and fetches its part unless that stays where it is."""
        (handle, refs), began_s = self.asked[number], time.monotonic()
        try:
            times, summary, notes = handle.get(refs[0], _left(deadline))
        finally:
            self.waited_s += time.monotonic() - began_s
        chunk = refs[1] if summary is not None else handle.unpack(handle.get(refs[1], _left(deadline)))
        return NodePart(times, notes, summary, chunk)


class ActingNodes:
    """The policies that nodes hold, their weights, and the chunks under way, `MOST_CHUNKS` at most.

    Args:
        nodes: Whoever has the handle of each node; handles may be replaced.
        replace: Starts the environments of a lost node elsewhere and calls :meth:`install` for it, or raises.
        follow: Called when nodes have been asked for something in which they may have started workers anew.
    """

    def __init__(
        self,
        nodes: Sequence[_HasHandle],
        replace: Callable[[int, NodeLostError], None],
        follow: Callable[[], None],
    ) -> None:
        self._nodes = nodes
        self._replace = replace
        self._follow = follow
        self._policies: dict[int, tuple[bytes, int]] = {}
        self._weights: dict[int, tuple[int, Any]] = {}
        self._flights: list[_Flight] = []
        self._publishing: list[tuple[NodeHandle, Any]] = []

    def load(self, key: int, policy: bytes, version: int = 0) -> None:
        """Gives every worker of every node a pickled policy, to be named by `key`, with weights of a version."""
        self._policies[key] = policy, version
        self._ask_all("ask", "load_policy", key, policy, version)

    def drop(self, key: int) -> None:
        """Lets every worker forget a policy and its weights."""
        self._ask_all("ask", "drop_policy", key)
        self._policies.pop(key, None)
        self._weights.pop(key, None)

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """Gives every node new weights, which each fetches once; a node that joins later can fetch them too.

        Chunks that are asked for from now on are taken with them. Nobody waits for a chunk under way. Between chunks
        only a policy's first weights are waited for, of which the workers are told, and those before these.
        """
        is_first = key not in self._weights
        newest = self._weights[key] = version, ray.put(weights)
        if self._flights:
            self._flights[-1].publishing += self._call_all("publish", key, *newest)
            return
        self.settle()
        self._publishing = self._call_all("publish", key, *newest)
        if is_first:
            self.settle()

    def install(self, handle: NodeHandle) -> None:
        """Gives a node that takes the place of another every policy, with the weights that it is to act with next."""
        for key, policy in self._policies.items():
            handle.call("ask", "load_policy", key, *policy)
            weights = self._due(key)
            if weights is not None:
                handle.call("publish", key, *weights)

    @property
    def num_under_way(self) -> int:
        """How many chunks are under way."""
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        """Whether another may be asked for."""
        return len(self._flights) < MOST_CHUNKS

    def begin(self, key: int, num_steps: int, first_step: int, noise_seed: int, with_summary: bool) -> None:
        """Lets every worker take steps with a policy over its own slice; :meth:`finish` returns what comes of it.

        While one chunk is under way another may be asked for if there is room; the workers go on with it by themselves.
        """
        assert self.has_room, "a chunk more than there is memory for"
        args = (key, num_steps, first_step, noise_seed, with_summary)
        asked = [(node.handle, _ask_rollout(node.handle, args)) for node in self._nodes]
        self._flights.append(_Flight(key, args, self._weights.get(key), asked))

    def finish(self, timeout_s: float | None = None) -> tuple[list[NodePart], float]:
        """Waits for the older chunk under way.

        A node that is lost meanwhile, where nodes are replaced, takes its steps once more, elsewhere, from new
        episodes, with the weights that the others acted with.

        Returns:
            The answer of every node, and how long they were waited for, in seconds.

        Raises:
            NotReady: It takes longer; the chunk stays under way.
        """
        flight = self._flights[0]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for number in range(len(self._nodes)):
            if number not in flight.parts:
                try:
                    flight.parts[number] = flight.wait(number, deadline)
                except NodeLostError as error:
                    flight.parts[number] = self._take_again(flight, number, error, deadline)
        del self._flights[0]
        self._publishing += flight.publishing
        return [flight.parts[number] for number in range(len(flight.asked))], flight.waited_s

    def settle(self) -> None:
        """Waits for the weights that were published before, or during, the chunk that :meth:`finish` has returned.

        To be called when note has been taken of the chunk: a node that is lost now goes on from its end.
        """
        publishing, self._publishing = self._publishing, []
        for handle, ref in publishing:
            for number, node in enumerate(self._nodes):
                if node.handle is handle:
                    try:
                        handle.get(ref)
                    except NodeLostError as error:
                        self._replace(number, error)  # which gives it the weights that are due
        if not self._flights:  # else the nodes step, and are followed when they have done so
            self._follow()

    def _take_again(self, flight: _Flight, number: int, error: NodeLostError, deadline: float | None) -> NodePart:
        while True:
            asked = flight.asked[number][0]
            if self._nodes[number].handle is asked:  # else somebody else has found out already
                self._replace(number, error)
            self._ask_again(number)
            try:
                return flight.wait(number, deadline)
            except NodeLostError as again:
                error = again

    def _ask_again(self, number: int) -> None:
        """Asks the successor of a lost node for all that is under way, in the order and with the weights of before."""
        handle = self._nodes[number].handle
        behind = self._flights[0]
        for flight in self._flights:
            if flight.weights is not None:
                behind.publishing.append((handle, handle.actor.publish.remote(flight.key, *flight.weights)))
            flight.asked[number] = handle, _ask_rollout(handle, flight.args)
            behind = flight
        for key, newest in self._weights.items():
            behind.publishing.append((handle, handle.actor.publish.remote(key, *newest)))

    def _due(self, key: int) -> tuple[int, Any] | None:
        """Returns the weights that a policy acts with next: those of the oldest chunk under way, or the newest."""
        return next((flight.weights for flight in self._flights if flight.key == key), self._weights.get(key))

    def _call_all(self, method: str, *args: Any) -> list[tuple[NodeHandle, Any]]:
        """Calls a method of every node's actor, all at once; returns who was called, and references."""
        return [(node.handle, getattr(node.handle.actor, method).remote(*args)) for node in self._nodes]

    def _ask_all(self, method: str, *args: Any) -> None:
        """The same, and waits; a node that is lost is replaced and asked again."""
        for number, (handle, ref) in enumerate(self._call_all(method, *args)):
            try:
                handle.get(ref)
            except NodeLostError as error:
                if self._nodes[number].handle is handle:
                    self._replace(number, error)
                self._nodes[number].handle.call(method, *args)
        if not self._flights:
            self._follow()


def _ask_rollout(handle: NodeHandle, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Asks a node for its part; returns references to its answer and to the part."""
    answer, chunk = handle.actor.rollout.options(num_returns=2).remote(*args)
    return answer, chunk


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
