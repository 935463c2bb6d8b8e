"""A process that holds one adapter, measures it on request, and answers with what it found.

Run by ``python -m rayvec.bench.harness.host READ_FD WRITE_FD``: requests and answers are lines of JSON in two pipes.
So the process that orders the measurement, with its progress bar, takes no time from the measured loop, and a peer may
live in a virtual environment of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.bench.harness.adapters import make_adapter
from rayvec.bench.harness.clocked import read_clocks
from rayvec.bench.harness.cpu import machine_cpu_s, marked, started_cpu_s
from rayvec.bench.harness.floors import ClusterFloor, Floor
from rayvec.bench.harness.split import STATES, split, split_ahead
from rayvec.bench.harness.task import Adapter

__all__ = ["MARK", "main"]

MARK = "RAYVEC_BENCH_MARK"
"""Environment variable that the processes of one benchmark have in common, Ray's among them."""
_WARM_CALLS = 2


class Host:
    """Serves requests about one adapter."""

    def __init__(self) -> None:
        self._before = marked(MARK) - {os.getpid()}
        self._adapter: Any = None
        self._clock_dir: str | None = None

    def start(self, peer: str, task: dict[str, Any], task_type: str) -> dict[str, Any]:
        """Makes the adapter."""
        begin = time.monotonic()
        self._clock_dir = task.get("clock_dir")
        adapter = self._adapter = make_adapter(peer, task, task_type)
        self._pids = marked(MARK) - self._before
        if isinstance(adapter, Adapter):
            adapter.rest()
        names = ("transport", "num_envs", "spans_nodes")
        return {name: getattr(adapter, name, None) for name in names} | {"start_s": time.monotonic() - begin}

    def update(self, seconds: float) -> dict[str, Any]:
        """Updates once to warm up, then for so many seconds, at least twice; returns the time of each update."""
        self._adapter.advance()
        times: list[float] = []
        samples = 0
        while len(times) < 2 or sum(times) < seconds:
            begin = time.perf_counter()
            samples += self._adapter.advance()
            times.append(time.perf_counter() - begin)
        return {"samples": samples, "times_s": times}

    def set_step(self, step_s: float, chunk_steps: int, inference: str | None = None) -> dict[str, Any]:
        """Sets how long emulated environments take and where actions are chosen, and warms up."""
        if inference is not None:
            self._adapter.set_inference(inference)
        self._adapter.set_step(step_s, chunk_steps)
        if isinstance(self._adapter, Adapter):
            for _ in range(_WARM_CALLS if step_s * chunk_steps < 0.5 else 1):
                self._adapter.advance()
            self._adapter.settle()  # a pending chunk would run beside the next measurement
        return {}

    def measure(self, seconds: float, with_split: bool) -> dict[str, Any]:
        """Steps for at least so many seconds; only whole calls inside the window count, over their own time."""
        if isinstance(self._adapter, Floor | ClusterFloor):
            before_s = started_cpu_s(self._pids)
            steps, elapsed, rate, inside = self._adapter.measure(seconds)
            shares = dict.fromkeys(STATES, 0.0) | {"environment": inside, "driver": 1.0 - inside}
            cpu_s = started_cpu_s(self._pids) - before_s
            return {"steps": steps, "elapsed_s": elapsed, "steps_per_s": rate, "cpu_s": cpu_s, "split": shares}
        self._adapter.wake()
        self._adapter.settle()
        nodes_s, used_s = self._adapter.kinds_cpu_s(), self._used_s()
        calls, inference, steps = [], [], 0
        begin = now = time.monotonic()
        while now - begin < seconds:
            asked = now
            steps += self._adapter.advance()
            now = time.monotonic()
            calls.append((asked, now))
            if with_split and (inference_s := self._adapter.call_inference_s()) is not None:
                inference.append(inference_s)
        used = {name: after - used_s[name] for name, after in self._used_s().items()}  # before the nodes are queried
        node_s, worker_s = np.subtract(self._adapter.kinds_cpu_s(), nodes_s)
        self._adapter.settle()  # a pending chunk ends after the window and is not counted
        self._adapter.rest()
        found = {"steps": steps, "elapsed_s": now - begin, "steps_per_s": steps / (now - begin)}
        found["split"] = self._adapter.own_split()
        found |= used | {"node_cpu_s": node_s, "worker_cpu_s": worker_s}
        if with_split and (clocks := self._clocks(calls[0][0])):
            found |= _divide(self._adapter, clocks, calls, inference, used["driver_cpu_s"] / len(calls))
        return found

    def _clocks(self, begin: float) -> list[NDArray[np.float64]]:
        """Returns when the steps of each worker began and ended; nothing where environments record no times."""
        if self._clock_dir is None:
            return list(self._adapter.clocks())
        by_pid = read_clocks(self._clock_dir, self._adapter.resets_within_steps)
        pids = self._adapter.worker_pids() or list(by_pid)
        clocks = [by_pid[pid] for pid in pids if pid in by_pid]
        return [clock for clock in clocks if len(clock) and clock[-1, 1] >= begin]  # the others no longer step

    def _used_s(self) -> dict[str, float]:
        """CPU time so far of what was started for this peer, of this process, and of the whole machine."""
        started_s = started_cpu_s(self._pids)
        return {"cpu_s": started_s, "driver_cpu_s": time.process_time(), "machine_cpu_s": machine_cpu_s()}

    def close(self) -> dict[str, Any]:
        """Ends the adapter."""
        if self._adapter is not None:
            self._adapter.close()
        return {}


def _divide(
    adapter: Adapter,
    clocks: list[NDArray[np.float64]],
    calls: list[tuple[float, float]],
    inference: list[NDArray[np.float64]],
    driver_s: float,
) -> dict[str, Any]:
    """Returns the share of each state, and the spread of step durations."""
    packing_s, ahead = adapter.packing_s(), adapter.steps_ahead()
    recent = [clock[clock[:, 0] >= calls[0][0]] for clock in clocks]
    durations = np.concatenate([times[:, 1] - times[:, 0] for times in recent])
    low, high = np.percentile(durations, (16, 84)) if len(durations) else (0.0, 0.0)
    spread = {"step_spread_s": float(high - low) / 2}  # a standard deviation that ignores outliers
    if ahead is not None:
        return spread | {"split": split_ahead(clocks, ahead, np.array(inference), packing_s)}
    since = max(clock[0, 0] for clock in clocks)  # older steps are not remembered
    first = next((i for i, (asked, _) in enumerate(calls) if asked >= since or i == len(calls) - 2), 0)
    times = np.array([*calls[first:], (calls[-1][1], calls[-1][1])])
    within = np.array(inference[first:]) if inference else None
    return spread | {"split": split(times, clocks, within, packing_s, max(0.0, driver_s - 0.5 * packing_s))}


def serve(requests: Any, answers: Any) -> None:
    """Answers requests until the pipe closes."""
    host = Host()
    for line in requests:
        request = json.loads(line)
        method: Callable[..., dict[str, Any]] = getattr(host, request.pop("do"))
        try:
            answer = method(**request)
        except Exception as error:
            traceback.print_exc()
            # LookupError: the library is installed, but lacks the environment
            is_missing = isinstance(error, ImportError | LookupError) and method.__name__ == "start"
            answer = {"missing": str(error)} if is_missing else {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serves the pipes that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    with os.fdopen(int(sys.argv[1])) as requests, os.fdopen(int(sys.argv[2]), "w") as answers:
        serve(requests, answers)


if __name__ == "__main__":
    main()
