"""Returns over environment steps, drawn by matplotlib: of one run, and of several with the spread of their seeds."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

__all__ = [
    "COLORS",
    "Curves",
    "curves_figure",
    "draw_learning_curve",
    "episode_mean",
    "plot_and_list",
    "plot_runs",
    "read_runs",
    "smoothed",
]

COLORS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#bbbbbb")
_POINTS = 200
_LINE_CHARS = 106
_LINE_INCHES = 0.16
"""Characters of a line of the legend, and its height."""
_AFFECTING_CURVES = {"learners", "num_learners", "sync_fraction", "variable_lengths", "precision"}
"""Settings that a resumed run may change, and that can change its curve all the same."""
_IGNORED_IN_GROUPS = {"seed", "run_dir", "env_id", "plugin", *ADJUSTABLE} - _AFFECTING_CURVES
"""Settings in which the runs of one group may differ. Runs of different environments are in different panels."""


@dataclass(frozen=True)
class Curves:
    """Runs that differ in their seed alone.

    Attributes:
        label: Algorithm, and the settings in which other runs of the same environment differ.
        env_id: Their environment.
        seeds: The seed of each run.
        training: Of each run, steps and smoothed returns of episodes in training, ``float64 [2, L]``.
        evaluations: Of each run, steps and mean returns of greedy evaluations during training, ``float64 [2, E]``.
        final: Mean returns of the greedy evaluations after training, of the runs that have one.
    """

    label: str
    env_id: str
    seeds: list[int]
    training: list[NDArray[np.float64]]
    evaluations: list[NDArray[np.float64]]
    final: list[float]

    def __str__(self) -> str:
        """The label, the number of runs and seeds, and the greedy return where runs have ended."""
        runs, seeds = len(self.seeds), sorted(set(self.seeds))
        of_seeds = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
        text = f"{self.label} ({of_seeds if runs == len(seeds) else f'{runs} runs, {of_seeds}'})"
        if self.final:
            text += f": greedy {np.mean(self.final):.2f}" + (f" ± {np.std(self.final):.2f}" * (len(self.final) > 1))
            text += f" ({len(self.final)} of {runs} runs evaluated)" * (len(self.final) < runs)
        return text


def draw_learning_curve(run_dir: Path, title: str, greedy: tuple[int, float] | None = None) -> None:
    """Draws ``learning_curve.png`` of a run, if its directory still exists: training episodes and evaluations.

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
    if not run_dir.is_dir():
        return
    lines = list(read_metrics(run_dir / "metrics.jsonl"))
    steps, returns, line_means = _training_points(lines)
    figure, (axes,) = curves_figure()
    blue, orange = COLORS[:2]
    label = "mean return per line of metrics.jsonl"
    axes.plot(steps, line_means, ".", color=blue, alpha=0.35, mew=0, ms=7, label=label)
    axes.plot(steps, returns, color=blue, linewidth=2, label="smoothed" if len(steps) else "no episode has ended")
    if (evaluations := _metric_points(lines, "eval/return_mean")).size:
        axes.plot(*evaluations, ".-", color=orange, linewidth=1.2, ms=5, label="greedy evaluations during training")
    if greedy:
        label = f"greedy evaluation after training: {greedy[1]:.2f}"
        axes.plot(*greedy, "D", color=orange, ms=7, clip_on=False, label=label)
    axes.legend(frameon=False, loc="best")
    axes.set(title=title, xlabel="environment steps", ylabel="return (sum of rewards in an episode)")
    axes.set_xlim(left=0)
    with written_whole(run_dir / "learning_curve.png") as file:
        figure.savefig(file, format="png")


def read_runs(run_dirs: Sequence[Path | str]) -> list[Curves]:
    """Returns the curves of runs, grouped.

    A run whose environment or network is a lambda, a function within another, or another object without a name, is a
    group of its own: other runs of this description may have other ones.

    Files, such as a picture beside the runs, are left out. So are directories without a ``config.yaml``, and runs that
    can't be read or in which no episode has ended, which lines on standard error name.

    Raises:
        ConfigError: A path does not exist, or no run is left.
    """
    runs: dict[Path, _Run] = {}
    errors: dict[Path, ConfigError] = {}
    for run_dir in dict.fromkeys(local_path(each) for each in run_dirs if not os.path.isfile(each)):
        try:
            runs[run_dir] = _read(run_dir)
        except ConfigError as error:
            if not os.path.lexists(run_dir):
                raise
            errors[run_dir] = error
    if not runs:
        raise next(iter(errors.values()), None) or ConfigError(
            "There is no run to plot. Pass directories of runs, such as runs/*."
        )
    for run_dir, problem in errors.items():
        print(f"rayvec: left out {run_dir}: {problem}", file=sys.stderr)
    configs = [run.config for run in runs.values()]
    groups: dict[tuple[str, str], list[_Run]] = {}
    for run_dir, run in runs.items():
        label = _label(run.config, configs) + (f", {run_dir}" if _has_unnamed(run.config) else "")
        groups.setdefault((run.config.env_id, label), []).append(run)
    return [
        Curves(
            label,
            env_id,
            [run.config.seed for run in members],
            [run.training for run in members],
            [run.evaluations for run in members],
            [run.final for run in members if run.final is not None],
        )
        for (env_id, label), members in groups.items()
    ]


class _Run(NamedTuple):
    """What a run's directory holds; see `Curves`."""

    config: TrainConfig
    training: NDArray[np.float64]
    evaluations: NDArray[np.float64]
    final: float | None


def _read(run_dir: Path) -> _Run:
    config, lines = load_config(run_dir), list(read_metrics(run_dir / "metrics.jsonl"))
    training = _training_points(lines)[:2]
    if not training.size:
        raise ConfigError(f"{run_dir / 'metrics.jsonl'} has no ended episodes, of which a curve is made.")
    return _Run(
        config, training, _metric_points(lines, "eval/return_mean"), load_result(run_dir).get("eval_return_mean")
    )


def _has_unnamed(config: TrainConfig) -> bool:
    """Whether the environment or the network of a run is a lambda, a function within another, or another object."""
    parts = config.env_id, getattr(config, "network", None) or ""
    return any(is_unnamed(part) and "<" in part for part in parts)


def _label(config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the algorithm, and the settings in which runs of the same algorithm and environment differ.

    Where presets differ, their names stand for the settings that have the values of the presets.
    """
    kin = [each for each in others if type(each) is type(config) and each.env_id == config.env_id]
    names = [name for name in field_names(type(config)) if name not in _IGNORED_IN_GROUPS]
    differing = [name for name in names if len({_shown(each, name) for each in kin}) > 1]
    if "preset" in differing:
        presets = [(each, type(each)(env_id=each.env_id, preset=each.preset)) for each in kin]
        own = [name for name in differing if any(_shown(a, name) != _shown(b, name) for a, b in presets)]
        differing = ["preset", *own]
    return ", ".join([config.algorithm.upper(), *(f"{name}={_shown(config, name)}" for name in differing)])


def _shown(config: TrainConfig, name: str) -> str:
    return config.learner_mode if name == "learners" else str(getattr(config, name))


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
    path = local_path(path)
    labels: dict[str, list[str]] = {}
    for each in groups:
        labels.setdefault(each.env_id, []).append(textwrap.fill(str(each), _LINE_CHARS))
    num_lines = max(sum(label.count("\n") + 1 for label in of_env) for of_env in labels.values())
    figure, panels = curves_figure(len(labels), height=4.2 + _LINE_INCHES * num_lines)
    for axes, (env_id, of_env) in zip(panels, labels.items(), strict=True):
        meaning = ""
        for number, group in enumerate(each for each in groups if each.env_id == env_id):
            color = COLORS[number % len(COLORS)]
            _draw(axes, group.training, color, "-", of_env[number])
            if all(each.size for each in group.evaluations):
                _draw(axes, group.evaluations, color, "--", None)
                meaning = " (solid: training; dashed: greedy evaluations during training)"
        axes.set(title=env_id, xlabel=f"environment steps{meaning}", ylabel="return (sum of rewards in an episode)")
        axes.set_xlim(left=0)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 5}
        axes.legend(frameon=False, fontsize=8, **below)
    with written_whole(path) as file:
        try:
            figure.savefig(file, format=path.suffix[1:].lower() or "png")
        except ValueError as error:
            raise ConfigError(f"{path} is no picture: {error}. Pass a name such as curves.png.") from None


def plot_and_list(groups: Sequence[Curves], path: Path) -> None:
    """Draws the picture of `plot_runs`, and prints a line for each group and where the picture is."""
    plot_runs(groups, path)
    for group in groups:
        print(f"{group.env_id} {group}")
    print(f"the curves are in {path}")


def _draw(axes: Any, runs: Sequence[NDArray[np.float64]], color: str, style: str, label: str | None) -> None:
    grid = np.linspace(max(run[0, 0] for run in runs), min(run[0, -1] for run in runs), _POINTS)
    if grid[0] > grid[-1]:  # the shortest run ends before another one has its first episode
        return
    values = np.array([np.interp(grid, *run) for run in runs])
    mean, spread = values.mean(0), values.std(0)
    marker = "o" if grid[0] == grid[-1] else None  # one point has no line
    axes.plot(grid, mean, style, marker=marker, color=color, linewidth=1.8, label=label)
    if len(runs) > 1:
        axes.fill_between(grid, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)


def curves_figure(count: int = 1, *, height: float = 4.5) -> tuple[Any, list[Any]]:
    """Returns a new figure and its axes, one below the other, for savefig without a screen.

    Args:
        count: Number of axes.
        height: Of each, in inches; the figure is 8 inches wide.
    """
    from matplotlib.figure import Figure  # here: loading it would delay a run's start
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, height * count), dpi=150, layout="constrained")
    axes = list(np.ravel(figure.subplots(count, squeeze=False)))
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25, linewidth=0.6)
        each.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, axes


def _metric_points(lines: Iterable[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
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
