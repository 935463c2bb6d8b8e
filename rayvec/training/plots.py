"""Returns over environment steps, drawn by matplotlib: of one run, and of several with the spread of their seeds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.config import ADJUSTABLE, TrainConfig
from rayvec.config.references import is_unnamed
from rayvec.config.schema import field_names
from rayvec.errors import ConfigError
from rayvec.training.atomic_files import local_path, written_whole
from rayvec.training.loggers import read_metrics
from rayvec.training.run_dir import load_config, load_result

__all__ = ["COLORS", "Curves", "curves_figure", "draw_learning_curve", "episode_mean", "plot_runs", "read_runs"]

COLORS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#bbbbbb")
_POINTS = 200
_IGNORED_IN_GROUPS = {"seed", "run_dir", "env_id", "preset", "plugin", *ADJUSTABLE} - {
    *("learners", "num_learners", "sync_fraction", "variable_lengths", "precision")
}
"""Settings in which the runs of one group may differ: all that may change on resume, but those that affect a curve."""


class _Run(NamedTuple):
    """A run: steps and smoothed returns of episodes in training ``float64 [2, L]``, those of greedy evaluations."""

    config: TrainConfig
    training: NDArray[np.float64]
    evaluations: NDArray[np.float64]
    final: float | None


class Curves(NamedTuple):
    """Runs that differ in their seed alone.

    Attributes:
        label: Algorithm, and the settings in which other runs of the same environment differ.
        env_id: Their environment.
        runs: The runs.
    """

    label: str
    env_id: str
    runs: list[_Run]

    def __str__(self) -> str:
        """The label, the number of runs and seeds, and the greedy return where runs have ended."""
        final = [run.final for run in self.runs if run.final is not None]
        seeds = sorted({run.config.seed for run in self.runs})
        greedy = f": greedy {np.mean(final):.2f} ± {np.std(final):.2f}, {len(final)} evaluated" if final else ""
        return f"{self.label} (runs: {len(self.runs)}, seeds: {', '.join(map(str, seeds))}){greedy}"


def draw_learning_curve(run_dir: Path, title: str, greedy: tuple[int, float] | None = None) -> None:
    """Draws ``learning_curve.png`` of a run: training episodes and evaluations.

    The smoothed line is a centred mean over about a twelfth of the run, each line of metrics weighted by its
    number of episodes.

    Args:
        run_dir: Directory of the run.
        title: The title.
        greedy: Steps at the greedy evaluation after training and its mean return, to be marked.

    Raises:
        ConfigError: The file can't be made.
        OSError: The disk is full.
    """
    lines = list(read_metrics(run_dir / "metrics.jsonl"))
    steps, smooth, means = _training_points(lines)
    figure, (axes,) = curves_figure()
    axes.plot(steps, means, ".", color=COLORS[0], alpha=0.35, label="mean return per line of metrics.jsonl")
    axes.plot(steps, smooth, color=COLORS[0], label="smoothed" if len(steps) else "no episode has ended")
    if (evaluations := _points(lines, "eval/return_mean")).size:
        axes.plot(*evaluations, ".-", color=COLORS[1], label="greedy evaluations during training")
    if greedy:
        axes.plot(*greedy, "D", color=COLORS[1], label=f"greedy evaluation after training: {greedy[1]:.2f}")
    axes.legend()
    axes.set(title=title, xlabel="environment steps", ylabel="return (sum of rewards in an episode)")
    with written_whole(run_dir / "learning_curve.png") as file:
        figure.savefig(file, format="png")


def read_runs(run_dirs: Iterable[Path | str]) -> list[Curves]:
    """Returns the curves of runs, grouped by the settings that decide what is learned.

    A run whose environment or network has no name, such as a lambda, is a group of its own. Files are left out. So are
    directories that can't be read as runs, or in which no episode has ended; lines on standard error name them.

    Raises:
        ConfigError: No run is left.
    """
    runs: dict[Path, _Run] = {}
    for run_dir in dict.fromkeys(local_path(each) for each in run_dirs if not os.path.isfile(each)):
        try:
            runs[run_dir] = _read(run_dir)
        except ConfigError as error:
            print(f"rayvec: left out {run_dir}: {error}", file=sys.stderr)
    if not runs:
        raise ConfigError("There is no run to plot. Pass directories of runs, such as runs/*.")
    groups: dict[tuple[str, str], list[_Run]] = {}
    for run_dir, run in runs.items():
        label = _label(run_dir, run.config, [each.config for each in runs.values()])
        groups.setdefault((run.config.env_id, label), []).append(run)
    return [Curves(label, env_id, members) for (env_id, label), members in groups.items()]


def _read(run_dir: Path) -> _Run:
    config, lines = load_config(run_dir), list(read_metrics(run_dir / "metrics.jsonl"))
    training = _training_points(lines)[:2]
    if not training.size:
        raise ConfigError(f"{run_dir / 'metrics.jsonl'} has no ended episodes, of which a curve is made.")
    return _Run(config, training, _points(lines, "eval/return_mean"), load_result(run_dir).get("eval_return_mean"))


def _label(run_dir: Path, config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the algorithm, and the settings in which runs of the same algorithm and environment differ."""
    kin = [each for each in others if type(each) is type(config) and each.env_id == config.env_id]
    names = [name for name in field_names(type(config)) if name not in _IGNORED_IN_GROUPS]
    differing = [name for name in names if len({str(getattr(each, name)) for each in kin}) > 1]
    parts = config.env_id, getattr(config, "network", None) or ""
    unnamed = [str(run_dir)] if any(is_unnamed(part) and "<" in part for part in parts) else []
    return ", ".join([config.algorithm.upper(), *(f"{name}={getattr(config, name)}" for name in differing), *unnamed])


def plot_runs(groups: Sequence[Curves], path: Path | str) -> None:
    """Draws returns over steps, smoothed, one panel for each environment and one line for each group.

    The line is the mean over runs; the area around it is one standard deviation wide in both directions, whose divisor
    is the number of runs. Lines end where the shortest run of their group does. Greedy evaluations during training are
    dashed.

    Args:
        groups: The runs.
        path: The picture; its suffix names the format, by default PNG.

    Raises:
        ConfigError: matplotlib writes no such format.
    """
    path, env_ids = local_path(path), list(dict.fromkeys(group.env_id for group in groups))
    figure, panels = curves_figure(len(env_ids))
    for axes, env_id in zip(panels, env_ids, strict=True):
        for number, group in enumerate(each for each in groups if each.env_id == env_id):
            color = COLORS[number % len(COLORS)]
            _draw(axes, [run.training for run in group.runs], color=color, label=str(group))
            if all(run.evaluations.size for run in group.runs):
                _draw(axes, [run.evaluations for run in group.runs], color=color, linestyle="--")
        axes.set(title=env_id, xlabel="environment steps (dashed: greedy evaluations)", ylabel="return")
        axes.legend(fontsize="small")
    with written_whole(path) as file:
        try:
            figure.savefig(file, format=path.suffix[1:].lower() or "png")
        except ValueError as error:
            raise ConfigError(f"{path} is no picture: {error}. Pass a name such as curves.png.") from None


def _draw(axes: Any, runs: Sequence[NDArray[np.float64]], *, color: str, **style: Any) -> None:
    grid = np.linspace(max(run[0, 0] for run in runs), min(run[0, -1] for run in runs), _POINTS)
    values = np.array([np.interp(grid, *run) for run in runs])
    mean, spread = values.mean(0), values.std(0)
    axes.plot(grid, mean, color=color, **style)
    axes.fill_between(grid, mean - spread, mean + spread, color=color, alpha=0.2)


def curves_figure(count: int = 1) -> tuple[Any, list[Any]]:
    """Returns a new figure and its `count` axes, one below the other, for savefig without a screen."""
    from matplotlib.figure import Figure  # here: loading it would delay a run's start

    figure = Figure(figsize=(8, 4.5 * count), dpi=150, layout="constrained")
    return figure, list(np.ravel(figure.subplots(count, squeeze=False)))


def _points(lines: Iterable[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    """Returns steps and values of one metric, of the lines that have it, ``[2, L]``."""
    points = [(line["steps"], line[name]) for line in lines if line.get(name) is not None]
    return np.array(points, np.float64).reshape(-1, 2).T


def episode_mean(line: Mapping[str, Any]) -> float:
    """Returns the mean return of the episodes that ended since the line before, of which there is at least one."""
    mean: float = line["return_sum"] / line["episodes"]
    return mean


def _training_points(lines: Iterable[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Returns steps, smoothed returns, and returns as they are, of the lines in which episodes ended, ``[3, L]``."""
    points = [(line["steps"], episode_mean(line), line["episodes"]) for line in lines if line.get("episodes")]
    steps, returns, episodes = np.array(points, np.float64).reshape(-1, 3).T
    reach = max(1, len(steps) // 25)
    total, weight = (
        np.array([values[max(0, i - reach) : i + reach + 1].sum() for i in range(len(steps))])
        for values in (returns * episodes, episodes)
    )
    return np.array([steps, total / weight, returns])
