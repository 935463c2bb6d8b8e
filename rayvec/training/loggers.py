"""Where a run's metrics go: a JSONL file, TensorBoard, and the progress display."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from rayvec.config import TrainConfig
from rayvec.errors import LIMITS_REMEDY, ConfigError
from rayvec.training.atomic_files import finite, written_whole
from rayvec.training.evaluation import Evaluation
from rayvec.training.progress_display import ProgressDisplay, progress_text
from rayvec.training.run_state import Progress
from rayvec.training.trainer import Iteration

__all__ = ["MetricsFile", "RunLogger", "read_metrics"]

logger = logging.getLogger(__name__)


class MetricsFile:
    """Lines of JSON, each an object with ``steps`` and what was measured since the line before.

    Args:
        path: The file, which need not exist.
        steps: Lines of later steps are dropped: a run that is resumed from a checkpoint writes them again. Damaged
            lines are dropped, too; the last one is damaged if the computer lost power.
    """

    def __init__(self, path: Path, steps: int) -> None:
        kept = [line for line in read_metrics(path) if line["steps"] <= steps]
        with written_whole(path) as file:
            file.write("".join(map(_json_line, kept)).encode())
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float | int | list[int] | None]) -> None:
        """Appends a line; NaN and infinity become null."""
        self._file.write(_json_line(metrics))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


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


def _json_line(metrics: Mapping[str, float | int | list[int] | None]) -> str:
    return json.dumps(finite(metrics), allow_nan=False) + "\n"


@dataclass
class _Line:
    """Sums over the iterations that one line of metrics is about."""

    steps: int = 0
    episodes: int = 0
    return_sum: float = 0.0
    staleness: int = 0
    staleness_counts: Counter[int] = field(default_factory=Counter)
    num_cut: int = 0
    sent_bytes: int = 0
    times_s: Counter[str] = field(default_factory=Counter)
    learner: dict[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    has_state: bool = False

    def add(self, iteration: Iteration) -> None:
        stats = iteration.stats
        self.steps += stats.n_collected_steps
        self.episodes += stats.n_collected_episodes
        self.return_sum += float(stats.returns.sum())
        self.staleness = max(self.staleness, stats.staleness)
        self.staleness_counts.update(dict(enumerate(stats.staleness_counts)))
        self.num_cut += iteration.num_cut
        self.sent_bytes += iteration.sent_bytes
        self.times_s.update(iteration.all_times_s)
        self.learner.update(iteration.metrics)
        self.evaluation = iteration.evaluation
        self.has_state = iteration.state is not None

    @property
    def split_s(self) -> dict[str, float]:
        """Wall time by activity."""
        return {name: seconds for name, seconds in self.times_s.items() if "/" not in name}


class RunLogger(contextlib.AbstractContextManager["RunLogger"]):
    """Sends metrics to ``metrics.jsonl``, to TensorBoard and to the terminal.

    A line is written once `config.log_interval_steps` have passed since the line before, with every checkpoint and
    evaluation, and when it is closed. Use it as a context manager.

    Args:
        run_dir: Directory of the run.
        config: Settings of the run.
        progress: How far the run has come, which the caller updates; metrics of later steps are dropped.
        logged: Numbers by name to add to the next line. Writing the line clears them.

    Raises:
        ConfigError: The system allows no thread for TensorBoard, or the directory is gone when a line is written.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        progress: Progress,
        logged: dict[str, float] | None = None,
    ) -> None:
        self._run_dir, self._config, self._progress = run_dir, config, progress
        self._logged = {} if logged is None else logged
        self._metrics = MetricsFile(run_dir / "metrics.jsonl", progress.steps)
        try:
            self._tensorboard = SummaryWriter(os.fspath(run_dir), purge_step=progress.steps + 1)
        except RuntimeError as error:  # of Thread.start
            self._metrics.close()
            raise ConfigError(
                f"TensorBoard could not start the thread that writes its file: {error}. {LIMITS_REMEDY}"
            ) from error
        self._display = ProgressDisplay(config.num_iterations * config.steps_per_iteration, progress.steps)
        self._line = _Line()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as other:
            if error is None:
                raise
            if str(other) != str(error):  # which is raised
                logger.warning("the metrics of the run can't be written: %s", other)

    def add(self, iteration: Iteration) -> dict[str, float | int | None]:
        """Adds one iteration, which `progress` counts already, to the line.

        Returns:
            The metrics since the last line.
        """
        self._line.add(iteration)
        metrics = self._measured()
        self._display.show(self._progress.steps, progress_text(self._progress, metrics, self._line.split_s))
        return metrics

    def end_line(self) -> None:
        """Writes the line if it is long enough, or if it ends with a checkpoint or an evaluation."""
        line = self._line
        is_kept = line.has_state or line.evaluation is not None
        if is_kept or line.steps >= self._config.log_interval_steps:
            self._write()

    def _measured(self) -> dict[str, float | int | None]:
        line, progress = self._line, self._progress
        returns, lens = progress.recent_returns, progress.recent_lens
        metrics: dict[str, float | int | None] = {
            "steps": progress.steps,
            "episodes": line.episodes,
            "return_sum": line.return_sum,
            "return_mean": float(np.mean(returns)) if returns else None,
            "return_min": min(returns) if returns else None,
            "return_max": max(returns) if returns else None,
            "len_mean": float(np.mean(lens)) if lens else None,
            "steps_per_s": line.steps / sum(line.split_s.values()),
            "staleness": line.staleness,
            **{f"time_s/{name}": seconds for name, seconds in line.times_s.items()},
            **{f"learner/{name}": value for name, value in line.learner.items()},
            **({"ranks_cut": line.num_cut, "sent_bytes": line.sent_bytes} if "wait" in line.times_s else {}),
        }
        if (evaluation := line.evaluation) is not None:
            metrics |= {"eval/return_mean": evaluation.return_mean, "eval/return_std": evaluation.return_std}
        return metrics

    def _write(self) -> None:
        if not self._run_dir.is_dir():
            raise ConfigError(
                f"The directory of the run, {self._run_dir}, is gone: it was removed or renamed. Resume the run "
                "from where it is now, or start it again."
            )
        metrics = self._measured() | self._logged
        counts, self._line = self._line.staleness_counts, _Line()
        self._logged.clear()
        by_age = [counts[age] for age in range(max(counts, default=-1) + 1)]
        self._metrics.write({**metrics, "staleness_counts": by_age} if by_age else metrics)
        if by_age:
            ages = np.repeat(np.arange(len(by_age)), by_age)
            self._tensorboard.add_histogram("staleness_counts", ages, self._progress.steps)
        shown = {name: value for name, value in metrics.items() if value is not None and name != "steps"}
        self._publish(shown)

    def _publish(self, metrics: Mapping[str, float | int]) -> None:
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, self._progress.steps)

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Logs the greedy episodes after training, if there are any."""
        if len(evaluation.returns):
            self._publish({"eval/return_mean": evaluation.return_mean, "eval/return_std": evaluation.return_std})

    def close(self) -> None:
        """Writes what is not yet written, and closes the files and the bar."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._metrics.close)
            stack.callback(self._tensorboard.close)
            stack.callback(self._display.close)
            if self._line.steps:
                self._write()
            elif self._logged:
                self._publish(self._logged)  # each step is in one line of the file
