"""Nodes that join, leave with notice, and end, under environments that move between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.placement_group import placement_group, remove_placement_group

from helpers.waiting import DEADLINE_S, wait_until

_PREEMPTION = 2
"""Ray's ``DRAIN_NODE_REASON_PREEMPTION``."""


class Nodes:
    """Nodes that a test adds to the shared cluster."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._added: list[Any] = []

    def join(self, num_cpus: int = 8) -> str:
        """Adds a node; returns its id once Ray lists it."""
        node = self._cluster.add_node(num_cpus=num_cpus)
        self._added.append(node)
        wait_until(lambda: node.node_id in alive_nodes(), "the node is listed")
        return str(node.node_id)

    def announce(self, node_id: str) -> None:
        """Announces that a node leaves."""
        announce(self._cluster, node_id)

    def kill(self, node_id: str, *, by_sigterm: bool = False) -> None:
        """Ends a node without notice, by SIGKILL or by SIGTERM to its raylet; returns once Ray knows."""
        for node in [each for each in self._added if each.node_id == node_id]:
            self._added.remove(node)
            self._cluster.remove_node(node, allow_graceful=by_sigterm)
        wait_until(lambda: node_id not in alive_nodes(), "the node is gone")

    def close(self) -> None:
        """Ends every node that was added."""
        for node in list(self._added):
            self.kill(node.node_id)


def announce(cluster: Any, node_id: str) -> None:
    """Announces that a node leaves, as an autoscaler does before it ends a spot instance."""
    from ray._raylet import GcsClient

    accepted, reason = GcsClient(address=cluster.address).drain_node(node_id, _PREEMPTION, "test", 0)
    assert accepted, reason


def alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@contextmanager
def without_cores_elsewhere() -> Iterator[Callable[[], None]]:
    """Claims the cores of all nodes but the driver's; yields what frees them, which makes the nodes join."""
    here, groups = ray.get_runtime_context().get_node_id(), []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] != here:
            label = {"ray.io/node-id": node["NodeID"]}
            groups.append(placement_group([{"CPU": node["Resources"]["CPU"]}], bundle_label_selector=[label]))
    ray.get([group.ready() for group in groups])

    def free() -> None:
        while groups:
            remove_placement_group(groups.pop())

    try:
        yield free
    finally:
        free()


def envs_by_node(env: Any) -> dict[str, list[int]]:
    """Returns the environments that each node holds, by its id."""
    found: dict[str, list[int]] = {}
    for node in env.topology.nodes:
        found.setdefault(node.node_id, []).extend(node.env_range)
    return found


def until_moved(env: Any, advance: Callable[[], None], nodes: Sequence[str | None]) -> dict[str, list[int]]:
    """Advances the environments until they are on just these nodes (None is the driver's) and on them evenly.

    Returns:
        The environments that each of them holds.
    """
    expected = {node or ray.get_runtime_context().get_node_id() for node in nodes}
    deadline = time.monotonic() + DEADLINE_S
    while (found := envs_by_node(env)).keys() != expected or max(map(len, found.values())) > fair_share(found):
        assert time.monotonic() < deadline, (expected, found)
        advance()
    return found


def fair_share(nodes: dict[str, list[int]]) -> int:
    """Returns the most environments that a node of equal ones holds: a fourth more than the mean, and rounding."""
    return int(np.ceil(1.25 * sum(map(len, nodes.values())) / len(nodes))) + 1


def first_actions(obs: NDArray[Any]) -> NDArray[np.int64]:
    """Chooses action 0 everywhere."""
    return np.zeros(len(obs), np.int64)
