"""Nodes in plain processes of this machine, and clusters of them, without Ray."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rayvec.cluster.cluster import Cluster
from rayvec.cluster.node import Node, NodeSpec
from rayvec.cluster.remote import NodeServer, RemoteNode
from rayvec.cluster.stream import Stream, accept, connect
from rayvec.data import NodeSlice, Topology
from rayvec.data.topology import even_bounds
from rayvec.envs.factory import EnvFactory
from rayvec.fleet.restarts import NO_RESTARTS, RestartPolicy

OWN, FAR = "own", "far"
_PROGRAM = "from helpers.node_kit import main; main()"


def main() -> None:
    """Serves one driver, which says the key by the standard input and gets the port by the standard output."""
    key = bytes.fromhex(sys.stdin.readline())
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    NodeServer(accept(listener, key)).serve()


class PlainNode:
    """A process that serves a node.

    Attributes:
        process: The process.
    """

    def __init__(self) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", _PROGRAM], **pipes)
        self.key = secrets.token_bytes(32)
        assert self.process.stdin is not None
        self.process.stdin.write(self.key.hex() + "\n")
        self.process.stdin.flush()

    def connect(self) -> Stream:
        assert self.process.stdout is not None
        return connect("127.0.0.1", int(self.process.stdout.readline()), self.key)

    def kept(self, number: int) -> Any:
        raise AssertionError("only Ray keeps chunks")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class PlainPlaces:
    """Opens nodes in plain processes, or in this one where the id of the place says so.

    Attributes:
        processes: Those that it has started.
    """

    def __init__(self, factory: EnvFactory, policy: RestartPolicy = NO_RESTARTS) -> None:
        self.factory, self.policy = factory, policy
        self.processes: list[PlainNode] = []

    def open(self, place: NodeSlice) -> Node | RemoteNode:
        first, stop = place.worker_bounds[0], place.worker_bounds[-1]
        parts, seed = self.factory.in_parts(place.worker_bounds), self.factory.seed
        spec = NodeSpec(parts, stop - first, seed, place.name, (), self.policy, first)
        if place.node_id != FAR:
            return Node(spec)
        self.processes.append(PlainNode())
        return RemoteNode(self.processes[-1], spec)

    def another(self, k: int, slices: Sequence[NodeSlice], error: Exception) -> NodeSlice:
        return slices[k]

    def moves(self, slices: Sequence[NodeSlice], leaving_only: bool) -> dict[int, NodeSlice]:
        return {}

    def leaves(self, place: NodeSlice) -> bool:
        return False

    def distrust(self, place: NodeSlice) -> None:
        pass


@contextmanager
def cluster_of(
    fns: Sequence[Callable[[], Any]],
    nodes: Sequence[str] = (OWN, FAR),
    workers: int = 1,
    policy: RestartPolicy = NO_RESTARTS,
    native: bool = False,
    rehost: bool = True,
) -> Iterator[Cluster]:
    """Makes a cluster of nodes of so many workers each."""
    factory = EnvFactory.build(list(fns), native=native)
    bounds = even_bounds(len(fns), len(nodes) * workers)
    slices = [
        NodeSlice(node, f"node-{k}", tuple(bounds[k * workers : (k + 1) * workers + 1]), 0)
        for k, node in enumerate(nodes)
    ]
    cluster = Cluster(Topology(tuple(slices)), PlainPlaces(factory, policy), rehost=rehost)
    try:
        cluster.allocate(cluster.spaces.observation, cluster.spaces.action)
        yield cluster
    finally:
        cluster.close()
