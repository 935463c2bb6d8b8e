"""A process that holds simulated nodes: each line that it reads is a number of cores, each answer an address.

Ray reads its settings when it is imported, so a private cluster with a token of its own is best started by a
process that has them from its beginning. ``python -m rayvec.bench.keeper``; it ends its nodes when its input ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys

__all__ = ["main"]

_OBJECT_STORE_BYTES = 512 * 2**20


def main() -> None:
    """Starts a head without cores, answers with its address, then adds a node for each line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray's own output is no answer
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    answers.write(f"{cluster.address}\n")
    for line in sys.stdin:
        cluster.add_node(num_cpus=int(line), object_store_memory=_OBJECT_STORE_BYTES)
        answers.write(f"{cluster.address}\n")
    with contextlib.suppress(Exception):
        cluster.shutdown()


if __name__ == "__main__":
    main()
