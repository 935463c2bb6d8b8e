"""A callback that gives the numbers of a run to Ray, each node of which serves them to Prometheus."""

from __future__ import annotations

import sys
from typing import Any

from rayvec.training.callbacks import RunContext

__all__ = ["COUNTERS", "GAUGES", "RayMetrics"]

COUNTERS = {
    "rayvec_steps_total": ("Environment steps taken.", ()),
    "rayvec_episodes_total": ("Episodes ended.", ()),
    "rayvec_iterations_total": ("Iterations: rounds of collecting and learning.", ()),
    "rayvec_time_seconds_total": ("Wall time by activity.", ("activity",)),
    "rayvec_restarts_total": ("Restarts of environments, workers and nodes.", ("kind",)),
    "rayvec_ranks_cut_total": ("Decentralized ranks that were stopped early.", ()),
    "rayvec_sent_bytes_total": ("Bytes that decentralized ranks sent over the network.", ()),
}
"""What each counter counts, from the start of the process, and its labels besides ``run``. Ray adds ``ray_``."""

GAUGES = {
    "rayvec_return_mean": "Mean return of the last 100 episodes.",
    "rayvec_staleness_updates": "Updates published after the oldest weights that acted.",
}
"""What each gauge measures."""


class RayMetrics:
    """Counts what iterations did, in the metrics of Ray. Where Ray is not initialised it does nothing.

    Each metric has the label ``run``, the name of the run's directory. Every run has this callback already.
    """

    def __init__(self) -> None:
        self._job: Any = None
        self._metrics: dict[str, Any] = {}

    def on_iteration(self, context: RunContext) -> None:
        """Adds the latest iteration."""
        ray, iteration = sys.modules.get("ray"), context.iteration
        if ray is None or not ray.is_initialized() or iteration is None:
            return
        runtime = ray.get_runtime_context()
        if (job := (runtime.gcs_address, runtime.get_job_id())) != self._job:
            self._job, self._metrics = job, _declared()
        stats, run = iteration.stats, {"run": context.run_dir.name}
        self._count("rayvec_steps_total", stats.n_collected_steps, run)
        self._count("rayvec_episodes_total", stats.n_collected_episodes, run)
        self._count("rayvec_iterations_total", 1, run)
        self._count("rayvec_ranks_cut_total", iteration.num_cut, run)
        self._count("rayvec_sent_bytes_total", iteration.sent_bytes, run)
        for activity, seconds in iteration.all_times_s.items():
            self._count("rayvec_time_seconds_total", seconds, {**run, "activity": activity})
        for kind, number in {"environment": stats.n_restarts, **stats.n_replaced}.items():
            self._count("rayvec_restarts_total", number, {**run, "kind": kind})
        self._metrics["rayvec_staleness_updates"].set(stats.staleness, run)
        if (return_mean := context.metrics.get("return_mean")) is not None:
            self._metrics["rayvec_return_mean"].set(return_mean, run)

    def _count(self, name: str, amount: float, labels: dict[str, str]) -> None:
        if amount > 0:  # Ray refuses to add 0
            self._metrics[name].inc(amount, labels)


def _declared() -> dict[str, Any]:
    from ray.util.metrics import Counter, Gauge

    counters = {name: Counter(name, text, ("run", *labels)) for name, (text, labels) in COUNTERS.items()}
    return {**counters, **{name: Gauge(name, text, ("run",)) for name, text in GAUGES.items()}}
