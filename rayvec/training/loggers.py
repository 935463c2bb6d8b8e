"""Callbacks that write metrics: into a file of JSON lines, for TensorBoard, Weights & Biases and Ray."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from rayvec.config import TrainConfig
from rayvec.errors import ConfigError
from rayvec.training.atomic_files import written_whole
from rayvec.training.callbacks import RunContext

__all__ = ["COUNTERS", "GAUGES", "MetricsFile", "RayMetrics", "TensorBoard", "WeightsAndBiases", "read_metrics"]

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


class MetricsFile:
    """Writes ``metrics.jsonl``: lines of JSON, each an object with ``steps`` and the metrics since the line before.

    Lines of steps after the checkpoint from which a run starts again are dropped: the run writes them again. Damaged
    lines are dropped, too; the last one is damaged if the computer lost power.
    """

    def on_start(self, context: RunContext) -> None:
        """Drops lines that the run will write again."""
        path = context.run_dir / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["steps"] <= context.progress.steps]
        with written_whole(path) as file:
            file.write("".join(map(_json_line, kept)).encode())

    def on_log(self, context: RunContext) -> None:
        """Appends a line; NaN and infinity become null.

        Raises:
            ConfigError: The directory of the run is gone.
        """
        counts = context.line.staleness_counts
        by_age = {"staleness_counts": [counts[age] for age in range(max(counts) + 1)]} if counts else {}
        try:
            with (context.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(_json_line({**context.metrics, **by_age}))
        except FileNotFoundError:
            raise ConfigError(
                f"The directory of the run, {context.run_dir}, is gone: it was removed or renamed. Resume the run "
                "from where it is now, or start it again."
            ) from None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a metrics file but those that are incomplete or damaged; nothing if it is absent."""
    for data in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # no JSON, or no UTF-8
            line = json.loads(data)
            if isinstance(line, dict) and isinstance(line.get("steps"), int):
                yield line


def _json_line(metrics: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


class TensorBoard:
    """Writes the numbers of ``metrics.jsonl`` for TensorBoard, and the evaluation after training."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, context: RunContext) -> None:
        """Begins a file; points of later steps are hidden, since the run writes them again."""
        self.on_close(context)
        self._writer = SummaryWriter(os.fspath(context.run_dir), purge_step=context.progress.steps + 1)

    def on_log(self, context: RunContext) -> None:
        """Writes the metrics of a line."""
        counts, steps = context.line.staleness_counts, context.progress.steps
        if counts:
            self._writer.add_histogram("staleness_counts", np.array(list(counts.elements())), steps)
        names = [name for name in context.metrics if name != "steps" and not name.startswith("eval/")]
        self._write({name: context.metrics[name] for name in names}, steps)

    def on_evaluation(self, context: RunContext) -> None:
        """Writes the metrics of an evaluation."""
        if context.evaluation is not None:
            self._write(context.evaluation.metrics, context.progress.steps)

    def on_close(self, context: RunContext) -> None:
        """Writes what was logged after the last line, and closes the file."""
        if self._writer is not None:
            self._write(context.logged, context.progress.steps)
            self._writer.close()
            self._writer = None

    def _write(self, values: Mapping[str, float | None], steps: int) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, steps)


class WeightsAndBiases:
    """Lets Weights & Biases copy what TensorBoard gets; it stands before `TensorBoard` in the list of callbacks.

    A run of it that is open already is used, and stays open. Otherwise a run begins in the project ``WANDB_PROJECT``,
    or else "rayvec", with its files beside the run's directory. A resumed run continues in the same one.

    Args:
        config: Settings of the run.

    Raises:
        ConfigError: The package is not installed.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._settings = config.to_plain()
        self._run: Any = None
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"track='wandb' needs the package wandb: {error}. Install it: pip install wandb. Or leave track out."
            ) from error

    def on_start(self, context: RunContext) -> None:
        """Begins or continues a run of Weights & Biases.

        Raises:
            ConfigError: The service can't be reached.
        """
        if self._run is None and self._wandb.run is not None:
            with contextlib.suppress(ValueError):  # it copies already
                self._wandb.tensorboard.patch()
        elif self._run is None:
            try:
                self._run = self._wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "rayvec"),
                    name=context.run_dir.name,
                    id=context.progress.tracker_run,
                    resume="allow",
                    dir=os.fspath(context.run_dir.parent),
                    config=self._settings,
                    sync_tensorboard=True,
                )
            except (self._wandb.errors.Error, OSError) as error:
                raise ConfigError(
                    f"Weights & Biases can't be reached: {' '.join(str(error).split())[:300]}. Run `wandb login`, "
                    "set WANDB_MODE=offline, or leave track out."
                ) from error
        if self._run is not None:
            context.progress.tracker_run = self._run.id

    def on_close(self, context: RunContext) -> None:
        """Ends the run that was begun; TensorBoard must be closed before."""
        if self._run is not None:
            self._run.finish(exit_code=int(context.error is not None))


class RayMetrics:
    """Counts what iterations did, in the metrics of Ray. Where Ray is not initialised it does nothing.

    Each metric has the label ``run``, the name of the run's directory. Every run has this callback already.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}

    def on_iteration(self, context: RunContext) -> None:
        """Adds the latest iteration."""
        ray, iteration = sys.modules.get("ray"), context.iteration
        if ray is None or not ray.is_initialized() or iteration is None:
            return
        stats, run = iteration.stats, {"run": context.run_dir.name}
        restarts = {"environment": stats.n_restarts, **stats.n_replaced}
        counted: list[tuple[str, float, dict[str, str]]] = [
            ("steps", stats.n_collected_steps, run),
            ("episodes", stats.n_collected_episodes, run),
            ("iterations", 1, run),
            ("ranks_cut", iteration.num_cut, run),
            ("sent_bytes", iteration.sent_bytes, run),
            *(("time_seconds", s, {**run, "activity": name}) for name, s in iteration.all_times_s.items()),
            *(("restarts", number, {**run, "kind": kind}) for kind, number in restarts.items()),
        ]
        self._metrics = self._metrics or _declared()
        for name, amount, labels in counted:
            if amount > 0:  # Ray refuses to add 0
                self._metrics[f"rayvec_{name}_total"].inc(amount, labels)
        self._metrics["rayvec_staleness_updates"].set(stats.staleness, run)
        if (return_mean := context.metrics.get("return_mean")) is not None:
            self._metrics["rayvec_return_mean"].set(return_mean, run)


def _declared() -> dict[str, Any]:
    from ray.util.metrics import Counter, Gauge

    counters = {name: Counter(name, text, ("run", *labels)) for name, (text, labels) in COUNTERS.items()}
    return {**counters, **{name: Gauge(name, text, ("run",)) for name, text in GAUGES.items()}}
