"""A process that holds one adapter, measures it on request, and answers with what it found.

Run by ``python -m rayvec.bench.harness.host``: requests and answers are lines of JSON. So the process that orders the
measurement, with its progress bar, takes no time from the measured loop, and a peer may live in a virtual environment
of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.bench.harness.adapters import make_adapter
from rayvec.bench.harness.machines import Machines, machine_cpu_s, marked, started_cpu_s
from rayvec.bench.harness.task import Adapter
from rayvec.bench.harness.time_split import STATES, split, split_ahead
from rayvec.bench.harness.upper_bound import ClusterUpperBound, UpperBound

__all__ = ["MARK", "main"]

MARK = "RAYVEC_BENCH_MARK"
"""Environment variable that the processes of one benchmark have in common, Ray's among them."""
_WARM_CALLS = 2


class Host:
    """Serves requests about one adapter."""

    def __init__(self) -> None:
        self._before = marked(MARK) - {os.getpid()}
        self._adapter: Any = None
        self._machines = Machines()
        self._clock_dir = ""

    def start(self, peer: str, task: dict[str, Any], task_type: str, record: bool) -> dict[str, Any]:
        """Makes the adapter; with `record` its environments record when they step."""
        begin = time.monotonic()
        if record:
            self._clock_dir = str(Path.cwd() / "clocks")
            task |= {"clock_dir": self._clock_dir}
        adapter = self._adapter = make_adapter(peer, task, task_type)
        self._pids = marked(MARK) - self._before
        start_s = time.monotonic() - begin
        if isinstance(adapter, Adapter):
            adapter.rest()
            if task.get("address") and adapter.spans_nodes:
                self._machines = Machines.of_cluster()
        names = ("transport", "num_envs", "spans_nodes", "address")
        return {name: getattr(adapter, name, None) for name in names} | {"start_s": start_s}

    def add(self, cores: int) -> None:
        """Adds a simulated node."""
        self._adapter.add(cores)

    def update(self, seconds: float) -> dict[str, Any]:
        """Updates once to warm up, then for so many seconds, at least twice.

        Returns:
            The time of each update, the CPU time of this process in all of them, and how many samples they had.
        """
        self._adapter.advance()
        times: list[float] = []
        samples, used_s = 0, time.process_time()
        while len(times) < 2 or sum(times) < seconds:
            begin = time.perf_counter()
            samples += self._adapter.advance()
            times.append(time.perf_counter() - begin)
        return {"samples": samples, "times_s": times, "cpu_s": time.process_time() - used_s}

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None = None) -> None:
        """Sets how long emulated environments take and where actions are chosen, and warms up."""
        self._adapter.set_step(step_s, chunk_steps, inference)
        if isinstance(self._adapter, Adapter):
            for _ in range(_WARM_CALLS if step_s * chunk_steps < 0.5 else 1):
                self._adapter.advance()
            self._adapter.settle()  # a pending chunk would run beside the next measurement

    def measure(self, seconds: float, with_split: bool) -> dict[str, Any]:
        """Steps for at least so many seconds; only whole calls inside the window count, over their own time."""
        adapter = self._adapter
        if isinstance(adapter, UpperBound | ClusterUpperBound):
            before_s = started_cpu_s(self._pids)
            steps, elapsed, rate, inside = adapter.measure(seconds)
            shares = dict.fromkeys(STATES, 0.0) | {"environment": inside, "driver": 1.0 - inside}
            cpu_s = started_cpu_s(self._pids) - before_s
            return {"steps": steps, "elapsed_s": elapsed, "steps_per_s": rate, "cpu_s": cpu_s, "split": shares}
        adapter.wake()
        adapter.settle()
        nodes_s, used_s = self._machines.kinds_cpu_s(adapter.node_pids), self._used_s()
        calls, inference, steps = [], [], 0
        begin = now = time.monotonic()
        while now - begin < seconds:
            asked = now
            steps += adapter.advance()
            now = time.monotonic()
            calls.append((asked, now))
            if with_split and (inference_s := adapter.call_inference_s()) is not None:
                inference.append(inference_s)
        used = {name: after - used_s[name] for name, after in self._used_s().items()}  # before the nodes are queried
        node_s, worker_s = np.subtract(self._machines.kinds_cpu_s(adapter.node_pids), nodes_s)
        network_bytes = adapter.network_bytes() / (steps / len(calls))
        adapter.settle()  # a pending chunk ends after the window and is not counted
        adapter.rest()
        clocks = self._clocks(calls[0][0]) if with_split else []
        divided = _divide(adapter, clocks, calls, inference, used["driver_cpu_s"] / len(calls)) if clocks else None
        found = {"steps": steps, "elapsed_s": now - begin, "steps_per_s": steps / (now - begin), "split": divided}
        return found | used | {"node_cpu_s": node_s, "worker_cpu_s": worker_s, "network_bytes_per_step": network_bytes}

    def _clocks(self, begin: float) -> list[NDArray[np.float64]]:
        """Returns when the steps of each worker began and ended; nothing where environments record no times."""
        found = self._machines.clocks(self._clock_dir, self._adapter.resets_within_steps)
        node_pids = self._adapter.node_pids.items()
        of_workers = [self._machines.key(node_id, pid) for node_id, pids in node_pids for pid in pids[1:]]
        clocks = [found[worker] for worker in of_workers or found if worker in found]
        return [clock for clock in clocks if len(clock) and clock[-1, 1] >= begin]  # the others no longer step

    def _used_s(self) -> dict[str, float]:
        """CPU time so far of what was started for this peer, of this process, and of the whole machine."""
        started_s = started_cpu_s(self._pids)
        return {"cpu_s": started_s, "driver_cpu_s": time.process_time(), "machine_cpu_s": machine_cpu_s()}

    def close(self) -> None:
        """Ends the adapter."""
        if self._adapter is not None:
            self._adapter.close()


def _divide(
    adapter: Adapter,
    clocks: list[NDArray[np.float64]],
    calls: list[tuple[float, float]],
    inference: list[NDArray[np.float64]],
    driver_s: float,
) -> dict[str, float]:
    """Returns the share of each state."""
    packing_s, ahead = adapter.packing_s(), adapter.steps_ahead()
    if ahead is not None:
        return split_ahead(clocks, ahead, np.array(inference), packing_s)
    since = max(clock[0, 0] for clock in clocks)  # older steps are not remembered
    first = next((i for i, (asked, _) in enumerate(calls) if asked >= since or i == len(calls) - 2), 0)
    times = np.array([*calls[first:], (calls[-1][1], calls[-1][1])])
    within = np.array(inference[first:]) if inference else None
    return split(times, clocks, within, packing_s, max(0.0, driver_s - 0.5 * packing_s))


def main() -> None:
    """Answers requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    host, answers = Host(), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            answer = getattr(host, name)(**request) or {}
        except Exception as error:
            traceback.print_exc()
            # LookupError: the library is installed, but lacks the environment
            is_missing = isinstance(error, ImportError | LookupError) and name == "start"
            answer = {"missing": str(error)} if is_missing else {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    host.close()


if __name__ == "__main__":
    main()
