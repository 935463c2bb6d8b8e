"""Policies on the nodes of a cluster: handed out, given new weights, and let act in the workers, a chunk at a time.

A node does what it is asked in order. So weights that are published while a chunk is pending wait behind it, without
the driver, and the next chunk begins with them; and a chunk that is asked for while one is pending begins on each node
as soon as its part of that one has been handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

from rayvec.cluster.nodes import Node, NodePart, Wait, Weights
from rayvec.errors import NodeLostError
from rayvec.node.chunk_memory import MOST_CHUNKS

__all__ = ["ActingNodes"]


class _HasNode(Protocol):
    @property
    def node(self) -> Node: ...


@dataclass(slots=True)
class _PendingChunk:
    """A chunk that was asked for.

    Attributes:
        key: Of the policy that acts.
        args: What the nodes were asked for.
        weights: Of the policy when the chunk began; None for those that it brought along.
        asked: Each node, and the wait for its part.
        publishing: Nodes, and the waits for weights that were published after the chunk had been asked for.
        parts: Parts so far, by the number of the node.
        waited_s: How long the driver has waited for them, in seconds.
    """

    key: int
    args: tuple[Any, ...]
    weights: Weights | None
    asked: list[tuple[Node, Wait]]
    publishing: list[tuple[Node, Wait]] = field(default_factory=list)
    parts: dict[int, NodePart] = field(default_factory=dict)
    waited_s: float = 0.0

    def wait(self, number: int, deadline: float | None = None) -> NodePart:
        """Waits for the part of a node."""
        began_s = time.monotonic()
        try:
            part: NodePart = self.asked[number][1](_left(deadline))
            return part
        finally:
            self.waited_s += time.monotonic() - began_s


class ActingNodes:
    """The policies that nodes hold, their weights, and the pending chunks, `MOST_CHUNKS` at most.

    Args:
        nodes: Holders of each node, which may be replaced there.
        replace: Starts the environments of a lost node elsewhere and calls :meth:`install` for it, or raises.
    """

    def __init__(self, nodes: Sequence[_HasNode], replace: Callable[[int, NodeLostError], None]) -> None:
        self._nodes = nodes
        self._replace = replace
        self._policies: dict[int, tuple[bytes, int]] = {}
        self._weights: dict[int, Weights] = {}
        self._pending: list[_PendingChunk] = []
        self._publishing: list[tuple[Node, Wait]] = []

    def load(self, key: int, policy: bytes, version: int = 0) -> None:
        """Gives every worker of every node a pickled policy, to be named by `key`, with weights of a version."""
        self._policies[key] = policy, version
        self._call_all(lambda node: node.load(key, policy, version), installed=True)

    def drop(self, key: int) -> None:
        """Lets every worker forget a policy and its weights."""
        self._call_all(lambda node: node.drop(key))
        self._policies.pop(key, None)
        self._weights.pop(key, None)

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """Gives every node new weights, which each fetches once; a node that joins later can fetch them too.

        Chunks that are asked for from now on are taken with them. Nothing waits for a pending chunk. Between chunks
        the driver waits for the weights published before these.
        """
        ref = ray.put(weights) if any(each.node.transport != "shm" for each in self._nodes) else None
        newest = self._weights[key] = Weights(version, weights if ref is not None else weights.copy(), ref)
        if self._pending:
            self._pending[-1].publishing += self._start_all(lambda node: node.publish(key, newest))
            return
        self.settle()
        self._publishing = self._start_all(lambda node: node.publish(key, newest))

    def install(self, node: Node) -> None:
        """Gives a node that replaces another every policy, with the weights that it acts with next."""
        for key, policy in self._policies.items():
            node.load(key, *policy)(None)
            weights = self._due(key)
            if weights is not None:
                node.publish(key, _fetchable(node, weights))(None)

    @property
    def num_under_way(self) -> int:
        """See :class:`~rayvec.pools.base.Acting`."""
        return len(self._pending)

    @property
    def has_room(self) -> bool:
        """See :class:`~rayvec.pools.base.Acting`."""
        return len(self._pending) < MOST_CHUNKS

    def begin(self, key: int, num_steps: int, first_step: int, noise_seed: int, by_reference: bool) -> None:
        """Lets every worker take steps with a policy over its own slice; :meth:`finish` returns the chunk.

        While one chunk is pending another may be asked for if there is room; the workers go from one to the next.
        """
        assert self.has_room, "a chunk more than there is memory for"
        args = (key, num_steps, first_step, noise_seed, by_reference)
        asked = self._start_all(lambda node: node.begin_rollout(*args))
        self._pending.append(_PendingChunk(key, args, self._weights.get(key), asked))

    def finish(self, timeout_s: float | None = None) -> tuple[list[NodePart], float]:
        """Waits for the oldest pending chunk.

        A node that is lost meanwhile, where nodes are replaced, takes its steps once more, elsewhere, from new
        episodes, with the weights that the others acted with.

        Returns:
            The part of every node, and how long the driver waited for them, in seconds.

        Raises:
            NotReady: It takes longer; the chunk stays pending.
        """
        chunk = self._pending[0]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for number in range(len(self._nodes)):
            if number not in chunk.parts:
                try:
                    chunk.parts[number] = chunk.wait(number, deadline)
                except NodeLostError as error:
                    chunk.parts[number] = self._take_again(chunk, number, error, deadline)
        del self._pending[0]
        self._publishing += chunk.publishing
        return [chunk.parts[number] for number in range(len(chunk.asked))], chunk.waited_s

    def settle(self) -> None:
        """Waits for the weights that were published before, or during, the chunk that :meth:`finish` has returned.

        To be called when the chunk's end has been noted: a node that is lost now resumes from there.
        """
        publishing, self._publishing = self._publishing, []
        for asked, wait in publishing:
            for number, each in enumerate(self._nodes):
                if each.node is asked:
                    try:
                        wait(None)
                    except NodeLostError as error:
                        self._replace(number, error)  # which gives it the weights that are due

    def _take_again(self, chunk: _PendingChunk, number: int, error: NodeLostError, deadline: float | None) -> NodePart:
        while True:
            if self._nodes[number].node is chunk.asked[number][0]:  # else it has been replaced already
                self._replace(number, error)
            self._ask_again(number)
            try:
                return chunk.wait(number, deadline)
            except NodeLostError as again:
                error = again

    def _ask_again(self, number: int) -> None:
        """Asks the replacement of a lost node for all that is pending, in the order and with the weights of before."""
        node = self._nodes[number].node
        behind = self._pending[0]
        for chunk in self._pending:
            if chunk.weights is not None:
                behind.publishing.append((node, node.publish(chunk.key, _fetchable(node, chunk.weights))))
            chunk.asked[number] = node, node.begin_rollout(*chunk.args)
            behind = chunk
        for key, newest in self._weights.items():
            behind.publishing.append((node, node.publish(key, _fetchable(node, newest))))

    def _due(self, key: int) -> Weights | None:
        """Returns the weights that a policy acts with next: those of the oldest pending chunk, or the newest."""
        return next((chunk.weights for chunk in self._pending if chunk.key == key), self._weights.get(key))

    def _start_all(self, start: Callable[[Node], Wait]) -> list[tuple[Node, Wait]]:
        """Starts something on every node, all at once; a node that is lost fails when it is waited for."""
        return [(each.node, _starting(start, each.node)) for each in self._nodes]

    def _call_all(self, start: Callable[[Node], Wait], *, installed: bool = False) -> None:
        """The same, and waits; a lost node is replaced and asked again, unless :meth:`install` has done it."""
        for number, (node, wait) in enumerate(self._start_all(start)):
            try:
                wait(None)
            except NodeLostError as error:
                if self._nodes[number].node is node:
                    self._replace(number, error)
                if not installed:
                    start(self._nodes[number].node)(None)


def _starting(start: Callable[[Node], Wait], node: Node) -> Wait:
    try:
        return start(node)
    except NodeLostError as error:
        lost = error

        def fail(timeout_s: float | None) -> Any:
            raise lost

        return fail


def _fetchable(node: Node, weights: Weights) -> Weights:
    """Returns weights that a node can fetch, where no other node had to fetch them before."""
    if weights.ref is not None or node.transport == "shm":
        return weights
    return weights._replace(ref=ray.put(weights.array))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
