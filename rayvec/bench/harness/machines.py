"""CPU time and recorded steps of processes, on this machine and on the other nodes of a cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from rayvec.bench.harness.recording import read_clocks

__all__ = ["Machines", "machine_cpu_s", "marked", "on_cpu_s", "started_cpu_s"]

_CLOCK_LOOKS = 7


def on_cpu_s(pids: Iterable[int]) -> list[float]:
    """Returns the CPU time of all threads of each process, to the nanosecond; 0 of a process that exited.

    psutil knows CPU times to a clock tick of 10 ms, which is more than a worker uses in a window.
    """
    return [1e-9 * sum(map(_on_cpu_ns, Path(f"/proc/{pid}/task").glob("*/schedstat"))) for pid in pids]


def _on_cpu_ns(path: Path) -> int:
    with contextlib.suppress(OSError):
        return int(path.read_text().split()[0])
    return 0


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


class _Machine:
    """A Ray actor of this class reads on the machine that it runs on."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function there."""
        return function(*args)


class Machines:
    """The machines of a Ray cluster, read together.

    Args:
        away: Ray's ids of the nodes on other machines; an actor on each reads there.
    """

    def __init__(self, away: Sequence[str] = ()) -> None:
        self._away: dict[str, Any] = {}
        self._ahead_s: dict[str, float] = {}
        for node_id in away:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._get, actor = ray.get, ray.remote(num_cpus=0)(_Machine)
            self._away[node_id] = actor.options(scheduling_strategy=on_node).remote()
            self._ahead_s[node_id] = self._clock_offset(node_id)

    @classmethod
    def of_cluster(cls) -> Machines:
        """Returns the machines of the cluster that this process is connected to."""
        import ray.util

        here = ray.util.get_node_ip_address()
        alive = [node for node in ray.nodes() if node["Alive"]]
        return cls([node["NodeID"] for node in alive if node["NodeManagerAddress"] != here])

    def _clock_offset(self, node_id: str) -> float:
        """Returns how far a machine's clock is ahead, measured by the quickest call.

        The error is at most half of that call's round trip (F. Cristian, Probabilistic clock synchronization, 1989).
        """
        looks: list[tuple[float, float]] = []
        for _ in range(_CLOCK_LOOKS):
            begin = time.monotonic()
            now = self._get(self._away[node_id].call.remote(time.monotonic))
            end = time.monotonic()
            looks.append((end - begin, now - 0.5 * (begin + end)))
        return min(looks)[1]

    def kinds_cpu_s(self, pids: Mapping[str, Sequence[int]]) -> tuple[float, float]:
        """Returns the CPU time so far of the first process of each node, and of the others: its actor, its workers."""
        asked = {name: each.call.remote(on_cpu_s, pids[name]) for name, each in self._away.items() if name in pids}
        found = [self._get(asked[name]) if name in asked else on_cpu_s(each) for name, each in pids.items()]
        return sum((each[0] for each in found), 0.0), sum((sum(each[1:]) for each in found), 0.0)

    def clocks(self, directory: str, within_steps: bool) -> dict[tuple[str, int], NDArray[np.float64]]:
        """Returns when steps began and ended by this machine's clock, by node ("" is this machine) and process."""
        found = {("", pid): rows for pid, rows in read_clocks(directory, within_steps).items()}
        for node_id, actor in self._away.items():
            there = self._get(actor.call.remote(read_clocks, directory, within_steps))
            found |= {(node_id, pid): rows - self._ahead_s[node_id] for pid, rows in there.items()}
        return found

    def key(self, node_id: str, pid: int) -> tuple[str, int]:
        """Returns what `clocks` calls a process."""
        return (node_id if node_id in self._away else "", pid)
