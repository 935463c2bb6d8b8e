"""The metrics that a run publishes for Prometheus, by name. Ray puts ``ray_`` before each name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "Metric"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: Its name, with its unit.
        kind: A ``"gauge"`` has a value of the last second or iteration; a ``"counter"`` counts from the start of the
            process.
        help: What it measures.
        labels: Its labels besides ``run``, the name of the run's directory.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    metric.name: metric
    for metric in (
        Metric("rayvec_steps_total", "counter", "Environment steps taken."),
        Metric("rayvec_episodes_total", "counter", "Episodes ended."),
        Metric("rayvec_iterations_total", "counter", "Iterations: rounds of collecting and learning."),
        Metric("rayvec_return_mean", "gauge", "Mean return of the last 100 episodes."),
        Metric("rayvec_time_seconds_total", "counter", "Wall time by activity.", ("activity",)),
        Metric("rayvec_restarts_total", "counter", "Restarts of environments, workers, nodes and ranks.", ("kind",)),
        Metric("rayvec_staleness_updates", "gauge", "Updates published after the oldest weights that acted."),
        Metric("rayvec_ranks_cut_total", "counter", "Decentralized ranks that were stopped early."),
        Metric("rayvec_sent_bytes_total", "counter", "Bytes that decentralized ranks sent over the network."),
        Metric("rayvec_node_environments", "gauge", "Environments of a node; 0 once it is gone.", ("node",)),
        Metric("rayvec_node_workers", "gauge", "Processes that step the environments of a node.", ("node",)),
        Metric("rayvec_node_steps_per_second", "gauge", "Environment steps per second of wall time.", ("node",)),
        Metric("rayvec_node_step_seconds", "gauge", "Mean duration of a step of one environment.", ("node",)),
        Metric("rayvec_node_efficiency_ratio", "gauge", "Share of the workers' time spent in steps.", ("node",)),
        Metric("rayvec_node_pending_chunks", "gauge", "Chunks that are requested and not finished.", ("node",)),
        Metric("rayvec_node_restarts_total", "counter", "Restarts of the environments of a node.", ("node",)),
    )
}
"""All metrics. `rayvec.training.monitor` gives each its values."""
