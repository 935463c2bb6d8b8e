"""A process that holds one way of stepping environments, measures it when told to, and says what it found.

Run by ``python -m rayvec.bench.harness.host READ_FD WRITE_FD``: requests and answers are lines of JSON in two pipes,
so that whoever orders the measurement, with its progress bar, takes no time from the loop that is measured, and
so that a peer may live in a virtual environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.bench.harness.adapters import ADAPTERS
from rayvec.bench.harness.clocked import read_clocks
from rayvec.bench.harness.cpu import machine_cpu_s, ticks_cpu_s
from rayvec.bench.harness.floors import ClusterFloor, Floor
from rayvec.bench.harness.split import STATES, split, split_ahead
from rayvec.bench.harness.task import Adapter, Task

__all__ = ["MARK", "main"]

MARK = "RAYVEC_BENCH_MARK"
"""Environment variable that the processes of one benchmark have in common, Ray's among them."""
_WARM_CALLS = 2


def marked() -> set[int]:
    """Returns the processes of this benchmark: those that were started with the same mark as this one."""
    mark = f"{MARK}={os.environ.get(MARK, '')}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.add(int(entry))
    return found


class Host:
    """Serves requests about one adapter."""

    def __init__(self) -> None:
        self._before = marked() - {os.getpid()}
        self._adapter: Any = None
        self._clock_dir: str | None = None

    def start(self, peer: str, task: dict[str, Any]) -> dict[str, Any]:
        """Makes the environments."""
        begin = time.monotonic()
        self._clock_dir = task.get("clock_dir")
        self._adapter = ADAPTERS[peer](Task(**task))
        self._pids = marked() - self._before
        if isinstance(self._adapter, Adapter):
            self._adapter.rest()
        start_s = time.monotonic() - begin
        return {"transport": self._adapter.transport, "start_s": start_s, "num_envs": self._adapter.num_envs}

    def start_learner(self, way: str, task: dict[str, Any]) -> dict[str, Any]:
        """Makes what updates."""
        from rayvec.bench.harness.learners import WAYS, LearnerTask

        begin = time.monotonic()
        self._adapter = WAYS[way](LearnerTask(**task))
        self._pids = marked() - self._before
        return {"transport": self._adapter.transport, "start_s": time.monotonic() - begin}

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
        """Sets how long emulated environments take, and who chooses actions, and warms up."""
        if inference is not None:
            self._adapter.set_inference(inference)
        self._adapter.set_step(step_s, chunk_steps)
        if isinstance(self._adapter, Adapter):
            for _ in range(_WARM_CALLS if step_s * chunk_steps < 0.5 else 1):
                self._adapter.advance()
            self._adapter.settle()  # a chunk in flight would run beside whoever is measured next
        return {}

    def measure(self, seconds: float, with_split: bool) -> dict[str, Any]:
        """Steps for at least so many seconds; only whole calls inside the window count, over their own time."""
        if isinstance(self._adapter, Floor | ClusterFloor):
            before = ticks_cpu_s(self._pids)
            steps, elapsed, rate, inside = self._adapter.measure(seconds)
            used = {
                "cpu_s": ticks_cpu_s(self._pids) - before,
                "driver_cpu_s": 0.0,
                "node_cpu_s": 0.0,
                "worker_cpu_s": 0.0,
            }
            shares = dict.fromkeys(STATES, 0.0) | {"environment": inside, "driver": 1.0 - inside}
            return {"steps": steps, "elapsed_s": elapsed, "steps_per_s": rate, **used, "split": shares}
        self._adapter.wake()
        self._adapter.settle()
        nodes_s, before_s = self._adapter.kinds_cpu_s(), self._own_cpu_s()
        calls, inference, steps = [], [], 0
        begin = now = time.monotonic()
        while now - begin < seconds:
            asked = now
            steps += self._adapter.advance()
            now = time.monotonic()
            calls.append((asked, now))
            if with_split and (inference_s := self._adapter.call_inference_s()) is not None:
                inference.append(inference_s)
        used = {name: after - before_s[name] for name, after in self._own_cpu_s().items()}  # before others are asked
        kinds = zip(("node_cpu_s", "worker_cpu_s"), self._adapter.kinds_cpu_s(), nodes_s, strict=True)
        used |= {name: after - earlier for name, after, earlier in kinds}
        self._adapter.settle()  # what is under way is not counted: it ends after the window
        self._adapter.rest()
        found = {"steps": steps, "elapsed_s": now - begin, "steps_per_s": steps / (now - begin), **used, "split": None}
        if with_split:
            clocks = self._clocks(calls[0][0])
            if clocks:
                found |= _divide(self._adapter, clocks, calls, inference, used["driver_cpu_s"] / len(calls))
        return found

    def _clocks(self, begin: float) -> list[NDArray[np.float64]]:
        """Returns when the steps of each worker began and ended; nothing where environments can't be asked."""
        if self._clock_dir is None:
            return list(self._adapter.clocks())
        by_pid = read_clocks(self._clock_dir, self._adapter.resets_within_steps)
        pids = self._adapter.worker_pids() or list(by_pid)
        clocks = [by_pid[pid] for pid in pids if pid in by_pid]
        return [clock for clock in clocks if len(clock) and clock[-1, 1] >= begin]  # the others step no longer

    def _own_cpu_s(self) -> dict[str, float]:
        """CPU time so far of what was started for this peer, of this process, and of the whole machine."""
        started_s = ticks_cpu_s(self._pids)
        return {"cpu_s": started_s, "driver_cpu_s": time.process_time(), "machine_cpu_s": machine_cpu_s()}

    def close(self) -> dict[str, Any]:
        """Ends what was started."""
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
    """Returns the share of each state, and how far the durations of steps are spread."""
    packing_s, ahead = adapter.packing_s(), adapter.steps_ahead()
    spread_s = _spread_s(clocks, calls[0][0])
    if ahead is not None:
        return {"split": split_ahead(clocks, ahead, np.array(inference), packing_s), "step_spread_s": spread_s}
    since = max(clock[0, 0] for clock in clocks)  # only the last steps are remembered
    first = next((i for i, (asked, _) in enumerate(calls) if asked >= since or i == len(calls) - 2), 0)
    times = np.array([*calls[first:], (calls[-1][1], calls[-1][1])])
    within = np.array(inference[first:]) if inference else None
    shares = split(times, clocks, within, packing_s, max(0.0, driver_s - 0.5 * packing_s))
    return {"split": shares, "step_spread_s": spread_s}


def _spread_s(clocks: Sequence[NDArray[np.float64]], begin: float) -> float:
    """Returns half of what the middle 68 % of step durations span: a standard deviation that outliers don't move."""
    durations = np.concatenate([times[:, 1] - times[:, 0] for times in (c[c[:, 0] >= begin] for c in clocks)])
    low, high = np.percentile(durations, (16, 84)) if len(durations) else (0.0, 0.0)
    return float(high - low) / 2


def serve(requests: Any, answers: Any) -> None:
    """Answers requests until there are no more."""
    host = Host()
    for line in requests:
        request = json.loads(line)
        method: Callable[..., dict[str, Any]] = getattr(host, request.pop("do"))
        try:
            answer = method(**request)
        except Exception as error:
            traceback.print_exc()
            # LookupError: the library is there, its environment is not
            is_missing = isinstance(error, ImportError | LookupError) and method.__name__.startswith("start")
            answer = {"missing": str(error)} if is_missing else {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serves the pipes that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us says when to end
    with os.fdopen(int(sys.argv[1])) as requests, os.fdopen(int(sys.argv[2]), "w") as answers:
        serve(requests, answers)


if __name__ == "__main__":
    main()
