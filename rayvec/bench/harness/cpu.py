"""CPU time of processes on this machine and on other nodes of a cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

__all__ = ["NodeProcesses", "machine_cpu_s", "marked", "on_cpu_s", "started_cpu_s"]


def on_cpu_s(pids: Iterable[int]) -> list[float]:
    """Returns the CPU time of all threads of each process, to the nanosecond; 0 of a process that exited.

    psutil knows CPU times to a clock tick of 10 ms, which is more than a worker uses in a window.
    """
    return [_threads_ns(pid) * 1e-9 for pid in pids]


def _threads_ns(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(path.read_text().split()[0])
    return total


def started_cpu_s(pids: Iterable[int]) -> float:
    """Returns the CPU time of processes with all threads that they ever had, in seconds, to a clock tick."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += sum(psutil.Process(pid).cpu_times()[:2])
    return total


def machine_cpu_s() -> float:
    """Returns the time that all cores have worked so far for any process."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def marked(name: str) -> set[int]:
    """Returns the processes whose environment variable `name` has the same value as in this one."""
    mark = os.environ.get(name, "")
    return {each.pid for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get(name) == mark}


class NodeProcesses:
    """The actor and the workers of each node.

    Args:
        pids: Of each node's actor and, after it, of its workers, by Ray's id of the node.
        away: Ids of nodes on other machines; an actor on each reads the times there.
    """

    def __init__(self, pids: Mapping[str, Sequence[int]], away: Sequence[str] = ()) -> None:
        self._pids = pids
        self._readers: dict[str, Any] = {}
        if away:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            self._get = ray.get
            reader: Any = ray.remote(num_cpus=0)(_Reader)
            for node_id in away:
                on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
                self._readers[node_id] = reader.options(scheduling_strategy=on_node).remote()

    def cpu_s(self) -> tuple[float, float]:
        """Returns the CPU time so far of all actors, and of all workers."""
        asked = {node_id: reader.read.remote(self._pids[node_id]) for node_id, reader in self._readers.items()}
        found = [
            self._get(asked[node_id]) if node_id in asked else on_cpu_s(pids) for node_id, pids in self._pids.items()
        ]
        return sum(each[0] for each in found), sum(sum(each[1:]) for each in found)

    def close(self) -> None:
        """Ends the readers."""
        self._readers.clear()


class _Reader:
    """Reads CPU times on its own node."""

    def read(self, pids: Sequence[int]) -> list[float]:
        return on_cpu_s(pids)
