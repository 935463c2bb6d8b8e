"""Where a run's metrics go: a JSONL file, TensorBoard, the terminal, and a plot of the learning curve."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from rayvec.config import TrainConfig
from rayvec.data import CollectStats
from rayvec.training.files import written_whole
from rayvec.training.learning_curve import plot_learning_curve
from rayvec.training.trainer import Iteration

__all__ = ["MetricsFile", "ProgressDisplay", "RunLogger", "read_metrics"]

RECENT_EPISODES = 100
"""The return on display is the mean over this many episodes."""

PLAIN_INTERVAL_S = 5.0
"""How often a line is printed where there is no terminal to draw a bar on."""


class MetricsFile:
    """Lines of JSON, one for each iteration, each an object with ``steps`` and what was measured.

    Args:
        path: The file, which need not exist.
        steps: Lines of later steps are dropped, and so is an incomplete line: a run that is resumed from a
            checkpoint writes them again.
    """

    def __init__(self, path: Path, steps: int) -> None:
        kept = [line for line in read_metrics(path) if line["steps"] <= steps] if path.exists() else []
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
    """Yields the lines of a metrics file, up to the first incomplete one."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def _json_line(metrics: Mapping[str, float | int | list[int] | None]) -> str:
    finite = {
        name: None if isinstance(value, (float, int)) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


class ProgressDisplay:
    """Steps, steps/s, recent return and where the time goes: a bar on a terminal, elsewhere a line every few seconds.

    Args:
        total_steps: Steps at the end of the run.
        file: The stream to write to; standard error if left out.
    """

    def __init__(self, total_steps: int, file: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._file = file or sys.stderr
        self._last_line_s = -math.inf
        self._bar: Progress | None = None
        console = Console(file=self._file)
        if console.is_terminal:
            columns = (TextColumn("{task.completed:,} steps"), BarColumn(None), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=console)
            self._task = self._bar.add_task("", total=total_steps)
            self._bar.start()

    def show(self, steps: int, text: str) -> None:
        """Shows that `steps` are done, and `text` beside it."""
        if self._bar:
            self._bar.update(self._task, completed=min(steps, self._total_steps), description=text)
        elif time.monotonic() - self._last_line_s >= PLAIN_INTERVAL_S or steps >= self._total_steps:
            self._last_line_s = time.monotonic()
            print(f"{steps:,}/{self._total_steps:,} steps · {text}", file=self._file, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar:
            self._bar.stop()


class RunLogger:
    """Sends the metrics of each iteration to ``metrics.jsonl``, to TensorBoard and to the terminal.

    Use it as a context manager: it draws ``learning_curve.png`` when it is left, also by an exception.

    Args:
        run_dir: Directory of the run.
        config: Settings of the run.
        steps: Steps already taken; metrics of later steps are dropped.
    """

    def __init__(self, run_dir: Path, config: TrainConfig, *, steps: int = 0) -> None:
        self._run_dir = run_dir
        self._title = f"{config.env_id} · {config.algorithm.upper()} · seed {config.seed}"
        self._metrics = MetricsFile(run_dir / "metrics.jsonl", steps)
        self._tensorboard = SummaryWriter(os.fspath(run_dir), purge_step=steps + 1)
        self._display = ProgressDisplay(config.num_iterations * config.steps_per_iteration)
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._greedy: tuple[int, float] | None = None

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def log(self, steps: int, iteration: Iteration) -> None:
        """Logs one iteration.

        Args:
            steps: Environment steps since the run began.
            iteration: What it did.
        """
        stats, times_s = iteration.stats, iteration.times_s
        whole_s = sum(times_s.values())
        metrics = {
            "steps": steps,
            **_episode_metrics(stats),
            "steps_per_s": stats.n_collected_steps / whole_s,
            "staleness": stats.staleness,
            **{f"time_s/{name}": seconds for name, seconds in times_s.items()},
            **{f"time_s/collect/{name}": seconds for name, seconds in stats.time_split_s.items()},
            **{f"learner/{name}": value for name, value in iteration.metrics.items()},
            **({"ranks_cut": iteration.num_cut, "sent_bytes": iteration.sent_bytes} if "wait" in times_s else {}),
        }
        counts = list(stats.staleness_counts)
        self._metrics.write({**metrics, "staleness_counts": counts} if counts else metrics)
        if counts:
            self._tensorboard.add_histogram("staleness_counts", np.repeat(np.arange(len(counts)), counts), steps)
        for name, value in metrics.items():
            if value is not None and name != "steps":
                self._tensorboard.add_scalar(name, value, steps)
        self._recent.extend(stats.returns.tolist())
        mean_return = f"{np.mean(self._recent):.1f}" if self._recent else "none yet"
        split = ", ".join(f"{name} {seconds / whole_s:.0%}" for name, seconds in times_s.items())
        self._display.show(steps, f"{metrics['steps_per_s']:,.0f} steps/s · return {mean_return} · {split}")

    def log_evaluation(self, steps: int, return_mean: float) -> None:
        """Logs the mean return of greedy episodes, and marks it in the learning curve; NaN is no evaluation."""
        if math.isfinite(return_mean):
            self._tensorboard.add_scalar("eval/return_mean", return_mean, steps)
            self._greedy = (steps, return_mean)

    def close(self) -> None:
        """Closes the files and the bar, and draws the learning curve."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._draw)
            stack.callback(self._metrics.close)
            stack.callback(self._tensorboard.close)
            stack.callback(self._display.close)

    def _draw(self) -> None:
        metrics = read_metrics(self._run_dir / "metrics.jsonl")
        plot_learning_curve(metrics, self._run_dir / "learning_curve.png", self._title, self._greedy)


def _episode_metrics(stats: CollectStats) -> dict[str, float | int | None]:
    ended = stats.n_collected_episodes > 0
    return {
        "episodes": stats.n_collected_episodes,
        "return_mean": float(stats.returns.mean()) if ended else None,
        "return_min": float(stats.returns.min()) if ended else None,
        "return_max": float(stats.returns.max()) if ended else None,
        "len_mean": float(stats.lens.mean()) if ended else None,
    }
