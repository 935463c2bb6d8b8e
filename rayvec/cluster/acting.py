"""Policies on the nodes of a cluster: loading them, publishing weights, and collecting chunks in the workers.

A node handles requests in order. If the driver publishes weights while a chunk is pending, the node applies them after
that chunk, and the next chunk starts with them. If the driver requests a chunk while one is pending, each node starts
it as soon as it has returned its part of the pending one.
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
from rayvec.node.interrupts import Uninterrupted
from rayvec.pools.base import Acting, deadline_in, seconds_until

__all__ = ["ActingNodes"]


class _HasNode(Protocol):
    @property
    def node(self) -> Node: ...


@dataclass(slots=True)
class _PendingChunk:
    """A requested chunk.

    Attributes:
        key: Key of the policy that acts.
        args: Arguments of the request to the nodes.
        weights: Weights of the policy when the chunk was requested; None for those that the policy was loaded with.
        asked: Each node, and the wait for its part.
        publishing: Nodes, and the waits for weights that were published after the chunk was requested.
        parts: Parts received so far, by node index.
        waited_s: How long the driver has waited for the parts, in seconds.
    """

    key: int
    args: tuple[Any, ...]
    weights: Weights | None
    asked: list[tuple[Node, Wait]]
    publishing: list[tuple[Node, Wait]] = field(default_factory=list)
    parts: dict[int, NodePart] = field(default_factory=dict)
    waited_s: float = 0.0

    def wait(self, number: int, deadline: float) -> NodePart:
        """Waits for the part of one node."""
        began_s = time.monotonic()
        try:
            part: NodePart = self.asked[number][1](seconds_until(deadline))
            return part
        finally:
            self.waited_s += time.monotonic() - began_s


class ActingNodes(Acting):
    """The policies that nodes hold, their weights, and up to `MOST_CHUNKS` pending chunks.

    Args:
        nodes: One holder for each node. A replacement node is set on the same holder.
        replace: Starts the environments of a lost node elsewhere and calls :meth:`install`, or raises.
    """

    def __init__(self, nodes: Sequence[_HasNode], replace: Callable[[int, NodeLostError], None]) -> None:
        self._nodes = nodes
        self._replace = replace
        self._policies: dict[int, tuple[bytes, int]] = {}
        self._weights: dict[int, Weights] = {}
        self._pending: list[_PendingChunk] = []
        self._publishing: list[tuple[Node, Wait]] = []

    def load(self, key: int, policy: bytes, version: int = 0) -> None:
        """Loads a pickled policy in every worker of every node, under `key`; `version` is that of its weights."""
        self._policies[key] = policy, version
        self._call_all(lambda node: node.load(key, policy, version), installed=True)

    def drop(self, key: int) -> None:
        """Removes a policy and its weights from every worker."""
        self._call_all(lambda node: node.drop(key))
        self._policies.pop(key, None)
        self._weights.pop(key, None)

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """Publishes new weights to every node. Each node fetches them once; a replacement node can fetch them too.

        Chunks that are requested after this call use these weights. The call doesn't wait for a pending chunk. If no
        chunk is pending, it waits until the nodes have received the previously published weights.
        """
        ref = ray.put(weights) if any(each.node.transport != "shm" for each in self._nodes) else None
        newest = self._weights[key] = Weights(version, weights.copy(), ref)
        if self._pending:
            self._pending[-1].publishing += self._start_all(lambda node: node.publish(key, newest))
            return
        self.settle()
        self._publishing = self._start_all(lambda node: node.publish(key, newest))

    def install(self, node: Node) -> None:
        """Loads every policy on a replacement node, with the weights that its next chunk uses."""
        for key, policy in self._policies.items():
            node.load(key, *policy)(None)
            weights = self._due(key)
            if weights is not None:
                node.publish(key, _fetchable(node, weights))(None)

    def begin(self, key: int, num_steps: int, first_step: int, noise_seed: int, by_reference: bool) -> None:
        """Requests a chunk: every worker steps its own slice with a policy. :meth:`finish` returns the chunk.

        If :attr:`has_room` is true, a chunk may be requested while another is pending. The workers then start it
        without waiting for the driver.
        """
        assert self.has_room, "a chunk more than there is memory for"
        args = (key, num_steps, first_step, noise_seed, by_reference)
        asked = self._start_all(lambda node: node.begin_rollout(*args))
        self._pending.append(_PendingChunk(key, args, self._weights.get(key), asked))

    def finish(self, timeout_s: float | None = None) -> tuple[list[NodePart], float]:
        """Waits for the oldest pending chunk.

        If a node is lost during the chunk and nodes are replaced, its replacement repeats the node's part. It starts
        from new episodes and uses the same weights as the other nodes.

        Returns:
            The part of every node, and how long the driver waited for them, in seconds.

        Raises:
            NotReady: The timeout expired; the chunk stays pending.
            NodeLostError: A node was lost and not replaced.
        """
        chunk = self._pending[0]
        deadline = deadline_in(timeout_s)
        for number in range(len(self._nodes)):
            if number not in chunk.parts:
                try:
                    chunk.parts[number] = chunk.wait(number, deadline)
                except NodeLostError as error:
                    chunk.parts[number] = self._take_again(chunk, number, error, deadline)
        with Uninterrupted():
            for each in self._nodes:
                each.node.release_chunk()
            del self._pending[0]
            self._publishing += chunk.publishing
        return [chunk.parts[number] for number in range(len(chunk.asked))], chunk.waited_s

    def settle(self) -> None:
        """Waits for the weights that were published before or during the chunk that :meth:`finish` returned.

        Call it after the last observations of the chunk have been recorded: a replacement node resumes from them.
        """
        publishing, self._publishing = self._publishing, []
        for asked, wait in publishing:
            for number, each in enumerate(self._nodes):
                if each.node is asked:
                    try:
                        wait(None)
                    except NodeLostError as error:
                        self._replace(number, error)  # the replacement receives the current weights

    def _take_again(self, chunk: _PendingChunk, number: int, error: NodeLostError, deadline: float) -> NodePart:
        while True:
            if self._nodes[number].node is chunk.asked[number][0]:  # else already replaced
                self._replace(number, error)
            self._ask_again(number)
            try:
                return chunk.wait(number, deadline)
            except NodeLostError as again:
                error = again

    def _ask_again(self, number: int) -> None:
        """Repeats all pending requests on a replacement node, in the same order and with the same weights."""
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
        """Returns the weights of a policy's next chunk: those of its oldest pending chunk, else the newest."""
        return next((chunk.weights for chunk in self._pending if chunk.key == key), self._weights.get(key))

    def _start_all(self, start: Callable[[Node], Wait]) -> list[tuple[Node, Wait]]:
        """Starts a request on every node; the wait for a lost node raises ``NodeLostError``."""
        return [(each.node, _starting(start, each.node)) for each in self._nodes]

    def _call_all(self, start: Callable[[Node], Wait], *, installed: bool = False) -> None:
        """Starts a request on every node and waits for all.

        A lost node is replaced. The request is repeated on the replacement unless `installed` says that
        :meth:`install` already covers it.
        """
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
    """Returns the weights with a reference that the node can fetch; puts them in the object store if needed."""
    if weights.ref is not None or node.transport == "shm":
        return weights
    return weights._replace(ref=ray.put(weights.array))
