"""The adapters that step environments and compute updates, by name."""

from __future__ import annotations

import pkgutil
from typing import Any

__all__ = ["ADAPTERS", "make_adapter"]

_HERE = "rayvec.bench.harness"
ADAPTERS = {
    "upper-bound": f"{_HERE}.upper_bound:UpperBound",
    "cluster-upper-bound": f"{_HERE}.upper_bound:ClusterUpperBound",
    "rayvec": f"{_HERE}.rayvec_adapters:Ours",
    "decentralized": f"{_HERE}.decentralized:Decentralized",
    "simulated-nodes": f"{_HERE}.simulated:SimulatedNodes",
    "process-pool": f"{_HERE}.rayvec_adapters:BarePool",
    "gymnasium-sync": f"{_HERE}.vectors:SyncVector",
    "gymnasium-async": f"{_HERE}.vectors:AsyncVector",
    "processes": f"{_HERE}.learners:ProcessGroup",
    "ranks": f"{_HERE}.learners:Group",
    "threads": f"{_HERE}.learners:Threads",
    "share": f"{_HERE}.learners:OneShare",
    "shared-memory": f"{_HERE}.learners:SharedMemory",
    "gloo": f"{_HERE}.learners:Gloo",
    "ddp": f"{_HERE}.learners:DDP",
}
"""Module and name of each; any other ``module:name`` that can be imported is an adapter too."""


def make_adapter(name: str, task: dict[str, Any], task_type: str) -> Any:
    """Makes an adapter; only then its library is imported, so that a missing library affects no other adapter."""
    adapter, make_task = (pkgutil.resolve_name(path) for path in (ADAPTERS.get(name, name), task_type))
    return adapter(make_task(**task))
