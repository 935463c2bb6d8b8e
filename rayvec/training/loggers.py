"""Where a run's numbers go: a JSONL file, TensorBoard, the terminal, and a picture of the learning curve."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from rayvec.config import TrainConfig
from rayvec.data import CollectStats

__all__ = ["MetricsFile", "ProgressDisplay", "RunLogger", "plot_learning_curve", "read_metrics"]

RECENT_EPISODES = 100
"""The return on display is the mean over this many episodes."""

PLAIN_INTERVAL_S = 5.0
"""How often a line is printed where there is no terminal to draw a bar on."""

BLUE, ORANGE = "#4477aa", "#ee7733"


class MetricsFile:
    """Lines of JSON, one for each iteration, each an object with ``steps`` and what was measured.

    Args:
        path: The file; it is made, or gone on with.
        steps: Lines of later steps are dropped, and so is a line that was cut off: a run that goes on from a
            checkpoint writes them again.
    """

    def __init__(self, path: Path, steps: int) -> None:
        kept = [line for line in read_metrics(path) if line["steps"] <= steps] if path.exists() else []
        partial = path.with_name(path.name + ".tmp")
        partial.write_text("".join(map(_json_line, kept)), encoding="utf-8")
        partial.replace(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float | int | None]) -> None:
        """Appends a line; what is not finite becomes null."""
        self._file.write(_json_line(metrics))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a metrics file, up to the first that is cut off."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def _json_line(metrics: Mapping[str, float | int | None]) -> str:
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


class ProgressDisplay:
    """Steps, steps/s, recent return and where the time goes: a bar on a terminal, elsewhere a line now and then.

    Args:
        total_steps: Steps at the end of the run.
        file: Where to; standard error if left out.
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
        """Gives the terminal back."""
        if self._bar:
            self._bar.stop()


class RunLogger:
    """Sends what an iteration measured to ``metrics.jsonl``, to TensorBoard and to the terminal.

    Use it as a context manager; on the way out it draws ``learning_curve.png``, whatever happened.

    Args:
        run_dir: Directory of the run.
        config: Settings of the run.
        steps: Steps already taken; what was logged beyond them is dropped.
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

    def log(
        self, steps: int, stats: CollectStats, learner_metrics: Mapping[str, float], times_s: Mapping[str, float]
    ) -> None:
        """Logs one iteration.

        Args:
            steps: Environment steps since the run began.
            stats: Of what was collected.
            learner_metrics: What the update returned.
            times_s: Wall time by activity in seconds.
        """
        whole_s = sum(times_s.values())
        metrics = {
            "steps": steps,
            **_episode_metrics(stats),
            "steps_per_s": stats.n_collected_steps / whole_s,
            "staleness": stats.staleness,
            **{f"time_s/{name}": seconds for name, seconds in times_s.items()},
            **{f"time_s/collect/{name}": seconds for name, seconds in stats.time_split_s.items()},
            **{f"learner/{name}": value for name, value in learner_metrics.items()},
        }
        self._metrics.write(metrics)
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
        """Closes what is open, and draws the learning curve."""
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


def plot_learning_curve(
    metrics: Iterable[Mapping[str, Any]], path: Path, title: str, greedy: tuple[int, float] | None = None
) -> None:
    """Draws the mean return of each iteration's episodes against environment steps, and its smoothed course.

    The smoothed line is a centred mean over about a twelfth of the run, each iteration weighted by its
    number of episodes.

    Args:
        metrics: Lines of a metrics file; those of iterations in which no episode ended are left out.
        path: Where to write the PNG.
        title: Above the picture.
        greedy: Steps at a greedy evaluation and its mean return, to be marked.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # at a run's end: half a second would delay its start
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    points = [(line["steps"], line["return_mean"], line["episodes"]) for line in metrics if line.get("episodes")]
    steps, returns, episodes = np.array(points, dtype=np.float64).reshape(-1, 3).T
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if len(steps):
        axes.plot(steps, returns, ".", color=BLUE, alpha=0.35, mew=0, ms=7, label="mean of an iteration's episodes")
        axes.plot(steps, _smoothed(returns, episodes), color=BLUE, linewidth=2, label="smoothed")
    if greedy:
        axes.plot(*greedy, "D", color=ORANGE, ms=7, clip_on=False, label=f"greedy evaluation: {greedy[1]:.1f}")
    if len(steps) or greedy:
        axes.legend(frameon=False, loc="best")
    else:
        axes.text(0.5, 0.5, "no episode has ended", transform=axes.transAxes, ha="center", color="grey")
    axes.set(title=title, xlabel="environment steps", ylabel="return (sum of rewards in an episode)")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _smoothed(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the weighted mean of each value's neighbourhood, which narrows towards both ends."""
    half = max(1, len(values) // 25)
    reach = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    around = [slice(i - r, i + r + 1) for i, r in enumerate(reach)]
    return np.array([np.average(values[part], weights=weights[part]) for part in around])
