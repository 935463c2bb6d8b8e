"""Shows a run to other programs while it trains: its status, and metrics for Prometheus.

Everything is made of the statistics of iterations, at most once a second, so a step costs nothing more. Metrics go to
Ray where Ray is used, and to an HTTP port of this process with ``metrics_port``.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rayvec.config import TrainConfig
from rayvec.data.batch import NodeStats, merge_nodes
from rayvec.errors import ConfigError
from rayvec.training.prometheus_names import METRICS
from rayvec.training.run_state import Progress
from rayvec.training.status import NodeStatus, RunStatus, end_state, write_status
from rayvec.training.trainer import Iteration

__all__ = ["Monitor"]

_INTERVAL_S = 1.0
_VERBS = {"gauge": "set", "counter": "inc"}
"""What the metrics of Ray and of prometheus_client call it to record a value."""
logger = logging.getLogger(__name__)
Labels = tuple[str, ...]


class _RaySink:
    """The metrics of Ray, which each of its nodes serves to Prometheus.

    Attributes:
        board: Shows the status of the run on the same Ray.
    """

    def __init__(self) -> None:
        from ray.util import metrics

        from rayvec.cluster.status_board import StatusBoard

        kinds = {"gauge": metrics.Gauge, "counter": metrics.Counter}
        self._metrics: dict[str, Any] = {
            each.name: kinds[each.kind](each.name, each.help, ("run", *each.labels)) for each in METRICS.values()
        }
        self.board = StatusBoard()

    def record(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Sets a gauge, or adds to a counter, more than 0."""
        getattr(self._metrics[name], _VERBS[METRICS[name].kind])(value, labels)


class _PortSink:
    """An HTTP port of this process that serves the metrics to Prometheus.

    Args:
        port: The port; 0 for any that is free.
        address: The address to listen on.

    Raises:
        ConfigError: prometheus_client is not installed, or nothing can listen there.
    """

    def __init__(self, port: int, address: str) -> None:
        try:
            prometheus = importlib.import_module("prometheus_client")
        except ImportError as error:
            raise ConfigError(
                "metrics_port serves metrics with prometheus_client.",
                expected="the package prometheus_client",
                got=str(error),
                remedy="Install rayvec[metrics], or leave metrics_port out.",
            ) from error
        registry = prometheus.CollectorRegistry()
        kinds = {"gauge": prometheus.Gauge, "counter": prometheus.Counter}
        self._metrics: dict[str, Any] = {
            each.name: kinds[each.kind](each.name, each.help, ("run", *each.labels), registry=registry)
            for each in METRICS.values()
        }
        try:
            self._server, self._thread = prometheus.start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "metrics_port is a free port of this machine.",
                expected=f"a port of {address} on which nothing listens",
                got=f"{port} ({getattr(error, 'strerror', None) or error})",
                remedy="Pass another metrics_port or metrics_address; 0 takes any free port.",
            ) from error
        print(f"rayvec: metrics at http://{address}:{self._server.server_port}/metrics", file=sys.stderr)

    def record(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Sets a gauge, or adds to a counter, more than 0."""
        getattr(self._metrics[name].labels(**labels), _VERBS[METRICS[name].kind])(value)

    def close(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Monitor(contextlib.AbstractContextManager["Monitor"]):
    """Collects what iterations did, and publishes it. Use it as a context manager around the whole run.

    Publishing never fails a run. Of several errors in a row, only the first is logged. The next status that is
    published has the counts of those that failed.

    Args:
        config: Settings of the run.
        run_dir: Its directory, which need not exist before `begin`.

    Raises:
        ConfigError: `metrics_port` can't be served.
    """

    def __init__(self, config: TrainConfig, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._port = None if config.metrics_port is None else _PortSink(config.metrics_port, config.metrics_address)
        self._ray: _RaySink | None = None
        self._ray_key: Any = None
        self._iterations: list[Iteration] = []
        self._progress = Progress()
        self._totals: Counter[tuple[str, Labels]] = Counter()
        self._new: Counter[tuple[str, Labels]] = Counter()
        self._seen_s: dict[str, float] = {}
        self._published_s = -math.inf
        self._number = 0
        self._last: RunStatus | None = None
        self._has_failed = False

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._last is not None:
            with contextlib.suppress(Exception):  # it counts even if an earlier one could not be published
                self._publish(end_state(error))
        if self._ray is not None:
            self._ray.board.close()
        if self._port is not None:
            self._port.close()

    def begin(self, progress: Progress) -> None:
        """Says that training begins, or continues after ranks were lost."""
        self._progress = progress
        self._publish_running()

    def count_lost_ranks(self) -> None:
        """Counts a restart of all ranks."""
        self._count("rayvec_restarts_total", 1, "rank")

    def add(self, iteration: Iteration) -> None:
        """Counts an iteration, which the progress counts already, and publishes if it is time."""
        stats = iteration.stats
        self._count("rayvec_steps_total", stats.n_collected_steps)
        self._count("rayvec_episodes_total", stats.n_collected_episodes)
        self._count("rayvec_iterations_total", 1)
        self._count("rayvec_ranks_cut_total", iteration.num_cut)
        self._count("rayvec_sent_bytes_total", iteration.sent_bytes)
        for activity, seconds in iteration.all_times_s.items():
            self._count("rayvec_time_seconds_total", seconds, activity)
        for kind, number in {"environment": stats.n_restarts, **stats.n_replaced}.items():
            self._count("rayvec_restarts_total", number, kind)
        for node in stats.nodes:
            self._count("rayvec_node_restarts_total", node.n_restarts, node.node)
            if node.n_steps:
                self._seen_s[node.node] = time.monotonic()
        self._iterations.append(iteration)
        if time.monotonic() - self._published_s >= _INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Publishes what was counted since the last time."""
        if self._iterations:
            self._publish_running()

    def _count(self, name: str, amount: float, *labels: str) -> None:
        if amount > 0:
            for counts in (self._totals, self._new):
                counts[name, labels] += amount  # type: ignore[assignment]  # counters of seconds

    def _publish_running(self) -> None:
        """Publishes what was counted; where that fails, it is tried again after the next iterations."""
        try:
            self._publish("running")
            self._has_failed = False
        except Exception as error:
            self._iterations.clear()
            if not self._has_failed:
                logger.warning(
                    "status.json, `rayvec top` and Ray's metrics are not updated until this works again: %s: %s",
                    type(error).__name__,
                    error,
                )
            self._has_failed = True

    def _publish(self, state: str) -> None:
        self._published_s = time.monotonic()
        status, gauges = self._status(state)
        self._last = status
        write_status(self._run_dir, status)
        if state != "running":
            gauges += [(name, (node.node,), 0.0) for node in status.nodes for name in _PER_NODE]
        counters = [(name, labels, amount) for (name, labels), amount in self._new.items()]
        for sink, (name, labels, value) in itertools.product(self._sinks(state == "running"), [*gauges, *counters]):
            named = zip(METRICS[name].labels, labels, strict=True)
            sink.record(name, value, {"run": self._run_dir.name, **dict(named)})
        self._new.clear()
        self._iterations.clear()
        if self._ray is not None and state == "running":
            self._ray.board.put(status.to_json())

    def _sinks(self, may_open: bool) -> list[_RaySink | _PortSink]:
        if "ray" in sys.modules and (ray := sys.modules["ray"]).is_initialized():
            context = ray.get_runtime_context()
            if (key := (context.gcs_address, context.get_job_id())) != self._ray_key:
                self._ray, self._ray_key = (_RaySink(), key) if may_open else (None, None)
        else:
            self._ray = self._ray_key = None
        return [sink for sink in (self._ray, self._port) if sink is not None]

    def _status(self, state: str) -> tuple[RunStatus, list[tuple[str, Labels, float]]]:
        """Returns the status, and the values of gauges."""
        iterations, progress = self._iterations, self._progress
        self._number += 1
        restarts = {
            labels[0]: count for (name, labels), count in self._totals.items() if name == "rayvec_restarts_total"
        }
        fresh: dict[str, Any] = {
            "state": state,
            "steps": progress.steps,
            "return_mean": float(np.mean(progress.recent_returns)) if progress.recent_returns else None,
            "restarts": dict(sorted(restarts.items())),
            "number": self._number,
        }
        if self._last is None:
            total_steps = self._config.num_iterations * self._config.steps_per_iteration
            last = RunStatus(str(self._run_dir.absolute()), self._config.title, state, 0, total_steps)
        else:
            last = self._last
        if not iterations:
            return replace(last, **fresh), []
        split_s: Counter[str] = Counter()
        for iteration in iterations:
            split_s.update(iteration.times_s)
        wall_s = sum(split_s.values())
        nodes = [self._node(node, wall_s) for node in _nodes(iterations)]
        gone = {node.node for node in last.nodes} - {node.node for node in nodes}
        status = replace(
            last,
            **fresh,
            steps_per_s=sum(each.stats.n_collected_steps for each in iterations) / wall_s,
            staleness=max(each.stats.staleness for each in iterations),
            time_share={name: seconds / wall_s for name, seconds in split_s.items()},
            nodes=tuple(nodes),
        )
        gauges = [gauge for node in nodes for gauge in _gauges(node)]
        gauges += [(name, (node,), 0.0) for node in gone for name in _PER_NODE]
        gauges.append(("rayvec_staleness_updates", (), float(status.staleness)))
        if status.return_mean is not None:
            gauges.append(("rayvec_return_mean", (), status.return_mean))
        return status, gauges

    def _node(self, node: NodeStats, wall_s: float) -> NodeStatus:
        is_measured = not math.isnan(node.environment_s) and node.n_steps > 0
        return NodeStatus(
            node.node,
            node.num_envs,
            node.num_workers,
            node.n_steps / wall_s,
            node.environment_s / node.n_steps if is_measured else None,
            node.environment_s / (node.num_workers * wall_s) if is_measured else None,
            self._totals["rayvec_node_restarts_total", (node.node,)],
            node.n_pending,
            time.monotonic() - self._seen_s.get(node.node, time.monotonic()),
        )


_PER_NODE = {
    "rayvec_node_environments": "num_envs",
    "rayvec_node_workers": "num_workers",
    "rayvec_node_steps_per_second": "steps_per_s",
    "rayvec_node_step_seconds": "step_s",
    "rayvec_node_efficiency_ratio": "efficiency",
    "rayvec_node_pending_chunks": "n_pending",
}
"""Gauges by node, and the fields of a status that they show."""


def _gauges(node: NodeStatus) -> list[tuple[str, Labels, float]]:
    values = {name: getattr(node, field) for name, field in _PER_NODE.items()}
    return [(name, (node.node,), float(value)) for name, value in values.items() if value is not None]


def _nodes(iterations: Sequence[Iteration]) -> tuple[NodeStats, ...]:
    """Returns what the nodes of the last iteration did in all of them; their sizes are those of the last one."""
    last = {node.node: node for node in iterations[-1].stats.nodes if node.num_envs}  # without those that were left
    zero = [NodeStats(node.node, node.num_envs, node.num_workers, n_pending=node.n_pending) for node in last.values()]
    done = [
        NodeStats(node.node, 0, 0, node.n_steps, node.environment_s, node.n_restarts)
        for iteration in iterations
        for node in iteration.stats.nodes
        if node.node in last
    ]
    return merge_nodes([*zero, *done])
