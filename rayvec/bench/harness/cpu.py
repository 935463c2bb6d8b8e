"""CPU time of processes on this machine and on other nodes of a cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["NodeProcesses", "machine_cpu_s", "on_cpu_s", "ticks_cpu_s"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def on_cpu_s(pids: Sequence[int]) -> list[float]:
    """Returns the CPU time of all threads of each process, to the nanosecond; 0 of one that has ended."""
    found = []
    for pid in pids:
        total = 0
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/schedstat") as file:
                    total += int(file.read().split()[0])
        found.append(total * 1e-9)
    return found


def ticks_cpu_s(pids: set[int]) -> float:
    """Returns the CPU time that processes and their threads of the past have used, in seconds, to a clock tick."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def machine_cpu_s() -> float:
    """Returns the time that this machine's cores have worked so far, for whomever: without being idle or waiting."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


class NodeProcesses:
    """The actor and the workers of each node, wherever it is.

    Args:
        pids: Of each node's actor and, after it, of its workers, by Ray's id of the node.
        away: Nodes that are no part of this machine; an actor on each reads the times there.
    """

    def __init__(self, pids: Mapping[str, Sequence[int]], away: Sequence[str] = ()) -> None:
        self._pids = pids
        self._readers: dict[str, Any] = {}
        if away:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            self._ray = ray
            reader: Any = ray.remote(num_cpus=0)(_Reader)
            self._readers = {
                node_id: reader.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
                ).remote()
                for node_id in away
            }

    def cpu_s(self) -> tuple[float, float]:
        """Returns the CPU time so far of all actors, and of all workers."""
        asked = {node_id: reader.read.remote(self._pids[node_id]) for node_id, reader in self._readers.items()}
        found = [
            self._ray.get(asked[node_id]) if node_id in asked else on_cpu_s(pids)
            for node_id, pids in self._pids.items()
        ]
        return sum(each[0] for each in found), sum(sum(each[1:]) for each in found)

    def close(self) -> None:
        """Ends the readers."""
        for reader in self._readers.values():
            self._ray.kill(reader)


class _Reader:
    """Reads CPU times on the node that it is placed on."""

    def read(self, pids: Sequence[int]) -> list[float]:
        return on_cpu_s(pids)
