"""Nodes of a Ray cluster simulated on this machine, in a process that has Ray's settings from its beginning."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

__all__ = ["SimulatedNodes"]

_OBJECT_STORE_BYTES = 512 * 2**20


class SimulatedNodes:
    """A head without cores, on which a driver runs, and nodes that are added.

    Args:
        task: Nothing.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.ERROR)
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address

    def add(self, cores: int) -> None:
        """Adds a node."""
        self._cluster.add_node(num_cpus=cores, object_store_memory=_OBJECT_STORE_BYTES)

    def close(self) -> None:
        """Ends the nodes."""
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
