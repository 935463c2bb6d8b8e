"""Callbacks that write metrics: into a file of JSON lines, and for TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from rayvec.errors import LIMITS_REMEDY, ConfigError
from rayvec.training.atomic_files import finite, written_whole
from rayvec.training.callbacks import RunContext

__all__ = ["MetricsFile", "TensorBoard", "read_metrics"]


class MetricsFile:
    """Writes ``metrics.jsonl``: lines of JSON, each an object with ``steps`` and the metrics since the line before.

    Lines of steps after the checkpoint from which a run starts again are dropped: the run writes them again. Damaged
    lines are dropped, too; the last one is damaged if the computer lost power.
    """

    def on_start(self, context: RunContext) -> None:
        """Drops lines that the run will write again."""
        kept = [line for line in read_metrics(self._path(context)) if line["steps"] <= context.progress.steps]
        with written_whole(self._path(context)) as file:
            file.write("".join(map(_json_line, kept)).encode())

    def on_log(self, context: RunContext) -> None:
        """Appends a line; NaN and infinity become null.

        Raises:
            ConfigError: The directory of the run is gone.
        """
        if not context.run_dir.is_dir():
            raise ConfigError(
                f"The directory of the run, {context.run_dir}, is gone: it was removed or renamed. Resume the run "
                "from where it is now, or start it again."
            )
        counts = context.line.staleness_counts
        by_age = {"staleness_counts": [counts[age] for age in range(max(counts) + 1)]} if counts else {}
        with self._path(context).open("a", encoding="utf-8") as file:
            file.write(_json_line({**context.metrics, **by_age}))

    def _path(self, context: RunContext) -> Path:
        return context.run_dir / "metrics.jsonl"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a metrics file but those that are incomplete or damaged; nothing if it is absent."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for data in file:
            try:
                line = json.loads(data)
            except ValueError:  # no JSON, or no UTF-8
                continue
            if isinstance(line, dict) and isinstance(line.get("steps"), int):
                yield line


def _json_line(metrics: Mapping[str, Any]) -> str:
    return json.dumps(finite(metrics), allow_nan=False) + "\n"


class TensorBoard:
    """Writes the numbers of ``metrics.jsonl`` for TensorBoard, and the evaluation after training."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def on_start(self, context: RunContext) -> None:
        """Begins a file; points of later steps are hidden, since the run writes them again.

        Raises:
            ConfigError: The system allows no thread for TensorBoard.
        """
        self.on_close(context)
        try:
            self._writer = SummaryWriter(os.fspath(context.run_dir), purge_step=context.progress.steps + 1)
        except RuntimeError as error:  # of Thread.start
            raise ConfigError(
                f"TensorBoard could not start the thread that writes its file: {error}. {LIMITS_REMEDY}"
            ) from error

    def on_log(self, context: RunContext) -> None:
        """Writes the metrics of a line."""
        counts, steps = context.line.staleness_counts, context.progress.steps
        if counts and self._writer is not None:
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
            if value is not None and self._writer is not None:
                self._writer.add_scalar(name, value, steps)
