"""Where benchmarks run: on the nodes of a cluster, or on nodes that are simulated on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator

import psutil

from rayvec.errors import require

_NODE_MIB, _ENV_MIB = 260.0, 25.0
"""Memory of a simulated node's own processes, and of an environment beside its independent process."""
_STORE_BYTES = 256 << 20

Grow = Callable[[int, int], None]
"""Makes sure that there are so many nodes of so many cores."""


@contextlib.contextmanager
def cluster_at(address: str) -> Iterator[tuple[str, Grow]]:
    """Yields the address of a cluster, whose nodes are those that it has.

    Raises:
        ConfigError: No cluster answers.
    """
    from rayvec.cluster.ray_session import ray_session

    with ray_session(address):
        yield address, lambda count, cores: None


@contextlib.contextmanager
def simulated_nodes() -> Iterator[tuple[str, Grow]]:
    """Yields the address of a private Ray whose head, where the driver runs, has no cores, and what adds nodes to it.

    So each node is reached by TCP.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="rvb-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        os.mkdir(f"{directory}/ray")  # without it, Ray would write an address file that others find
        os.environ |= {
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": directory,
            "RAY_worker_niceness": "0",
        }
        os.environ.pop("RAY_ADDRESS", None)
        if "ray" not in sys.modules:  # which reads it when it is imported
            os.environ["RAY_AUTH_MODE"] = "token"
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.ERROR)
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=head)

        def grow(count: int, cores: int) -> None:
            while len(cluster.worker_nodes) < count:
                cluster.add_node(num_cpus=cores, object_store_memory=_STORE_BYTES)

        try:
            yield cluster.address, grow
        finally:
            cluster.shutdown()
            os.environ.clear()
            os.environ |= before


def check_memory(num_nodes: int, cores_per_node: int) -> None:
    """Refuses more emulated cores than this machine's memory has room for.

    Raises:
        ConfigError: There is not enough.
    """
    needed = num_nodes * (_NODE_MIB + cores_per_node * _ENV_MIB) / 1024
    available = psutil.virtual_memory().available / 2**30
    require(
        needed <= available,
        f"{num_nodes} simulated nodes of {cores_per_node} cores need about {needed:.1f} GiB of memory, and "
        f"{available:.1f} GiB are available. Lower --nodes or --cores-per-node.",
    )
