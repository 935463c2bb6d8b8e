"""Policies on the nodes of a cluster: loading them, and collecting chunks in the workers.

A request for a chunk carries the weights that the chunk acts with, so publishing contacts no node. A node handles
requests in order. If the driver requests a chunk while one is pending, each node starts it as soon as it has returned
its part of the pending one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rayvec.cluster.node_interface import Member, Node, NodePart, Wait, Weights, reading_others
from rayvec.cluster.reachability import put
from rayvec.data import ChunkRequest
from rayvec.errors import NodeLostError
from rayvec.fleet.deferred_signals import Uninterrupted
from rayvec.pools.base import Acting, NotReady, deadline_in, seconds_until

__all__ = ["ClusterInference"]


@dataclass(slots=True)
class _PendingChunk:
    """A requested chunk.

    Attributes:
        key: Key of the policy that acts.
        request: How many steps are requested, and which noise.
        weights: Weights of the policy when the chunk was requested; None for those that the policy was loaded with.
        on_node: Whether it acts in the processes that own the workers.
        requested: Each node that takes part, by index, and the wait for its part of the chunk.
        received: What has been received of it, by node index.
        waited_s: How long the driver has waited for the parts, in seconds.
    """

    key: int
    request: ChunkRequest
    weights: Weights | None
    on_node: bool
    requested: dict[int, tuple[Node, Wait]] = field(default_factory=dict)
    received: dict[int, NodePart] = field(default_factory=dict)
    waited_s: float = 0.0

    @property
    def parts(self) -> Collection[int]:
        """The nodes that take part."""
        return self.requested.keys()

    def request_from(self, number: int, node: Node) -> None:
        """Requests the part of a node."""
        weights = self.weights
        if weights is not None and weights.ref is None and node.transport != "shm":
            weights = self.weights = weights._replace(ref=put(weights.array, "weights"))
        self.requested[number] = node, node.begin_rollout(self.key, weights, self.request)

    def wait(self, number: int, deadline: float) -> NodePart:
        """Waits for the part of one node."""
        began_s = time.monotonic()
        try:
            part: NodePart = self.requested[number][1](seconds_until(deadline))
            return part
        finally:
            self.waited_s += time.monotonic() - began_s


class ClusterInference(Acting):
    """The policies that nodes hold, their weights, and up to `MOST_CHUNKS` pending chunks of each node.

    Args:
        nodes: One holder for each node. A replacement node is set on the same holder.
        replace: Starts the environments of a lost node elsewhere and calls :meth:`install`, or raises.
    """

    def __init__(self, nodes: Sequence[Member], replace: Callable[[int, NodeLostError], None]) -> None:
        self._nodes = nodes
        self._replace = replace
        self._policies: dict[int, tuple[bytes, int, bool]] = {}
        self._weights: dict[int, Weights] = {}
        self._pending: list[_PendingChunk] = []

    def load(self, key: int, policy: bytes, version: int = 0, *, on_node: bool = False) -> None:
        """See :class:`~rayvec.pools.base.Acting`. It loads the policy on every node."""
        self._policies[key] = policy, version, on_node
        try:
            self._call_all(lambda node: node.load(key, policy, version, on_node), installed=True)
        except BaseException:
            del self._policies[key]  # or a replacement node would load it
            raise

    def drop(self, key: int) -> None:
        """Removes a policy and its weights from every worker."""
        self._call_all(lambda node: node.drop(key))
        self._policies.pop(key, None)
        self._weights.pop(key, None)

    def publish(self, key: int, version: int, weights: NDArray[np.float32]) -> None:
        """See :class:`~rayvec.pools.base.Acting`. Each node fetches the weights once, with the next chunk."""
        ref = put(weights, "weights") if any(each.node.transport != "shm" for each in self._nodes) else None
        self._weights[key] = Weights(version, weights.copy(), ref)

    def has_room(self, key: int, part: int | None = None) -> bool:
        """See :class:`~rayvec.pools.base.Acting`."""
        on_node = self._policies[key][2]
        return all(chunk.on_node == on_node for chunk in self._pending) and super().has_room(key, part)

    def install(self, node: Node) -> None:
        """Loads every policy on a replacement node."""
        for key, policy in self._policies.items():
            node.load(key, *policy)(None)

    def begin(self, key: int, request: ChunkRequest, part: int | None = None) -> None:
        """Requests a chunk from every node, or from one: every worker steps its own slice with a policy.

        A chunk may be requested while one is pending. The workers then start it without waiting for the driver.
        """
        chunk = _PendingChunk(key, request, self._weights.get(key), self._policies[key][2])
        assert self.has_room(key, part), "more chunks than memory"
        for number in range(len(self._nodes)) if part is None else [part]:
            chunk.request_from(number, self._nodes[number].node)
        self._pending.append(chunk)

    def finish(self, timeout_s: float | None = None, part: int | None = None) -> tuple[list[NodePart], float]:
        """Waits for the oldest pending chunk, of all nodes or of one.

        If a node is lost during the chunk and nodes are replaced, its replacement repeats the node's part. It starts
        from new episodes and uses the same weights as the other nodes.

        Returns:
            The part of every node that takes it, and how long the driver waited for them, in seconds.

        Raises:
            NotReady: The timeout expired; the chunk stays pending.
            NodeLostError: A node was lost and not replaced.
        """
        chunk: _PendingChunk = self._pending_of(part)[0]
        deadline = deadline_in(timeout_s)
        for number in chunk.parts:
            while number not in chunk.received:
                self._receive(chunk, number, deadline)
        with Uninterrupted():
            for number, (node, _) in chunk.requested.items():
                if node is self._nodes[number].node:  # else its environments have moved since
                    node.release_chunk()
            self._pending.remove(chunk)
        return [chunk.received[number] for number in chunk.parts], chunk.waited_s

    def has_finished(self, number: int) -> bool:
        """Whether a node has finished its oldest pending chunk. A node that is lost is replaced."""
        chunk: _PendingChunk = self._pending_of(number)[0]
        if number not in chunk.received:
            with contextlib.suppress(NotReady):
                self._receive(chunk, number, 0.0)
        return number in chunk.received

    def _receive(self, chunk: _PendingChunk, number: int, deadline: float) -> None:
        """Waits for a node's part. If the node is lost, only requests the part again, from its replacement."""
        try:
            chunk.received[number] = chunk.wait(number, deadline)
        except NodeLostError as error:
            self._request_again(number, error)
        except KeyboardInterrupt:
            if chunk.on_node and self._nodes[number].node.transport == "shm":  # this process was taking its steps
                self._pending.remove(chunk)
            raise

    def settle(self, number: int) -> NodePart | None:
        """Waits for a node's parts of all pending chunks and keeps them, so that the node may be closed.

        Returns:
            Its part of the newest pending chunk; None if no chunk is pending.

        Raises:
            NodeLostError: The node was lost.
        """
        part = None
        for chunk in self._pending_of(number):
            if number not in chunk.received:
                part = chunk.wait(number, math.inf)
                if self._nodes[number].node.transport == "shm":  # views of memory that ends with the node
                    kept = deepcopy(part.chunk) if part.summary is None else part.chunk
                    part = part._replace(summary=deepcopy(part.summary), chunk=kept)
                chunk.received[number] = part
            part = chunk.received[number]
        return part

    def _request_again(self, number: int, error: NodeLostError) -> None:
        """Repeats the requests for all pending chunks on the node that replaces a lost one, in the same order."""
        pending = [chunk for chunk in self._pending_of(number) if number not in chunk.received]
        if self._nodes[number].node is pending[0].requested[number][0]:
            self._replace(number, error)  # else it was replaced before
        for chunk in pending:
            chunk.request_from(number, self._nodes[number].node)

    def _call_all(self, start: Callable[[Node], Wait], *, installed: bool = False) -> None:
        """Starts a request on every node and waits for all.

        A lost node is replaced. The request is repeated on the replacement unless `installed` says that
        :meth:`install` already covers it.
        """
        waits = [(each.node, start(each.node)) for each in self._nodes]
        for number, (node, wait) in enumerate(waits):
            try:
                with reading_others([other for _, other in waits[number + 1 :]]):
                    wait(None)
            except NodeLostError as error:
                if self._nodes[number].node is node:
                    self._replace(number, error)
                if not installed:
                    start(self._nodes[number].node)(None)
