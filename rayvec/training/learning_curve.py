"""The learning curve of a run as a figure, and its points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.training.atomic_files import is_of, written_whole
from rayvec.training.loggers import read_metrics
from rayvec.training.matplotlib_figures import BLUE, ORANGE, curves_figure

__all__ = [
    "draw_learning_curve",
    "episode_mean",
    "learning_curve_figure",
    "metric_points",
    "training_points",
    "without_damaged_lines",
]


def draw_learning_curve(run_dir: Path, title: str, greedy: tuple[int, float] | None = None) -> None:
    """Draws ``learning_curve.png`` of a run, if its directory still exists; see :func:`learning_curve_figure`.

    Raises:
        ConfigError: The file can't be made.
        OSError: The disk is full.
    """
    if run_dir.is_dir():
        lines = list(without_damaged_lines(read_metrics(run_dir / "metrics.jsonl")))
        figure = learning_curve_figure(lines, title, greedy)
        with written_whole(run_dir / "learning_curve.png") as file:
            figure.savefig(file, format="png")


def learning_curve_figure(
    lines: Sequence[Mapping[str, Any]], title: str, greedy: tuple[int, float] | None = None
) -> Any:
    """Returns a figure of returns against environment steps, for savefig: training episodes and evaluations.

    The smoothed line is a centred mean over about a twelfth of the run, each line of metrics weighted by its
    number of episodes.

    Args:
        lines: Undamaged lines of a metrics file; those in which no episode ended have no point.
        title: The title.
        greedy: Steps at the greedy evaluation after training and its mean return, to be marked.
    """
    steps, returns, line_means = training_points(lines)
    evaluations = metric_points(lines, "eval/return_mean")
    figure, (axes,) = curves_figure()
    if len(steps):
        axes.plot(
            steps, line_means, ".", color=BLUE, alpha=0.35, mew=0, ms=7, label="mean return per line of metrics.jsonl"
        )
        axes.plot(steps, returns, color=BLUE, linewidth=2, label="smoothed")
    if evaluations.size:
        axes.plot(*evaluations, ".-", color=ORANGE, linewidth=1.2, ms=5, label="greedy evaluations during training")
    if greedy:
        label = f"greedy evaluation after training: {greedy[1]:.1f}"
        axes.plot(*greedy, "D", color=ORANGE, ms=7, clip_on=False, label=label)
    if len(steps) or evaluations.size or greedy:
        axes.legend(frameon=False, loc="best")
    else:
        axes.text(0.5, 0.5, "no episode has ended", transform=axes.transAxes, ha="center", color="grey")
    axes.set(title=title, xlabel="environment steps", ylabel="return (sum of rewards in an episode)")
    axes.set_xlim(left=0)
    return figure


def without_damaged_lines(lines: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the lines of metrics but those with a value that no run writes, such as text.

    A metric of a learner may have any value. Where it is no number, the line is yielded without it.
    """
    for whole in lines:
        odd = [name for name, value in whole.items() if value is not None and not is_of(value, float)]
        line = {name: value for name, value in whole.items() if name not in odd or not name.startswith("learner/")}
        has_mean = line.get("return_sum", line.get("return_mean")) is not None
        if line.keys().isdisjoint({*odd} - {"staleness_counts"}) and (has_mean or not line.get("episodes")):
            yield line


def metric_points(lines: Iterable[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    """Returns steps and values of one metric, of the lines that have it, ``[2, L]``."""
    points = [(line["steps"], line[name]) for line in lines if line.get(name) is not None]
    return np.array(points, np.float64).reshape(-1, 2).T


def episode_mean(line: Mapping[str, Any]) -> float:
    """Returns the mean return of the episodes that ended since the line before, of which there is at least one."""
    mean: float = line["return_sum"] / line["episodes"] if "return_sum" in line else line["return_mean"]
    return mean


def training_points(lines: Iterable[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Returns steps, smoothed returns, and returns as they are, of the lines in which episodes ended, ``[3, L]``."""
    points = [(line["steps"], episode_mean(line), line["episodes"]) for line in lines if line.get("episodes")]
    steps, returns, episodes = np.array(points, dtype=np.float64).reshape(-1, 3).T
    return np.array([steps, smoothed(returns, episodes), returns])


def smoothed(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the weighted mean of each value's neighbourhood, which narrows towards both ends."""
    index = np.arange(len(values))
    reach = np.minimum(max(1, len(values) // 25), np.minimum(index, index[::-1]))
    bounds = np.stack([index - reach, index + reach + 1], axis=1).ravel()
    padded = np.pad([values * weights, weights], ((0, 0), (0, 1)))  # reduceat refuses bounds after the last value
    total, weight = np.add.reduceat(padded, bounds, axis=1)[:, ::2]
    means: NDArray[np.float64] = total / weight
    return means
