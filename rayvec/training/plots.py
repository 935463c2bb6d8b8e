"""Curves of several runs: those that differ in their seed alone are one line, with the spread of its seeds."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.config import ADJUSTABLE, TrainConfig
from rayvec.config.references import is_unnamed
from rayvec.config.schema import describe
from rayvec.errors import ConfigError, without_remedy
from rayvec.training.atomic_files import written_whole
from rayvec.training.learning_curve import metric_points, training_points, without_damaged_lines
from rayvec.training.loggers import read_metrics
from rayvec.training.matplotlib_figures import COLORS, curves_figure
from rayvec.training.run_dir import load_config, load_result

__all__ = ["Curves", "plot_and_list", "plot_runs", "read_runs"]

_POINTS = 200
_LINE_CHARS = 106
_LINE_INCHES = 0.16
"""Characters of a line of the legend, and its height."""
_AFFECTING_CURVES = {"learners", "num_learners", "sync_fraction", "min_share", "variable_lengths", "precision"}
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
            text += f": greedy {np.mean(self.final):.1f}" + (f" ± {np.std(self.final):.1f}" * (len(self.final) > 1))
            text += f" ({len(self.final)} of {runs} runs evaluated)" * (len(self.final) < runs)
        return text


def read_runs(run_dirs: Sequence[Path | str]) -> list[Curves]:
    """Returns the curves of runs, grouped.

    A run whose environment or network is a lambda, a function within another, or another object without a name, is a
    group of its own: other runs of this description may have other ones.

    Files, such as a picture beside the runs, are left out. So are other directories, and runs that can't be read or in
    which no episode has ended, which lines on standard error name.

    Raises:
        ConfigError: A path does not exist, or no run is left.
    """
    runs: dict[Path, _Run] = {}
    errors: dict[Path, ConfigError] = {}
    for run_dir in _found([Path(each) for each in run_dirs]):
        try:
            runs[run_dir] = _read(run_dir)
        except ConfigError as error:
            if not os.path.lexists(run_dir):
                raise
            errors[run_dir] = error
    if not runs:
        raise next(iter(errors.values()))
    for run_dir, problem in errors.items():
        print(f"rayvec: left out {run_dir}: {without_remedy(problem)}", file=sys.stderr)
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
    config, lines = load_config(run_dir), list(without_damaged_lines(read_metrics(run_dir / "metrics.jsonl")))
    training = training_points(lines)[:2]
    if not training.size:
        raise ConfigError(
            "A curve is made of episodes.",
            expected=f"episodes that have ended, in {run_dir / 'metrics.jsonl'}",
            got="none",
            remedy="Let this run train for longer.",
        )
    return _Run(
        config, training, metric_points(lines, "eval/return_mean"), load_result(run_dir).get("eval_return_mean")
    )


def _has_unnamed(config: TrainConfig) -> bool:
    """Whether the environment or the network of a run is a lambda, a function within another, or another object."""
    parts = config.env_id, getattr(config, "network", None) or ""
    return any(is_unnamed(part) and "<" in part for part in parts)


def _found(paths: Sequence[Path]) -> list[Path]:
    """Returns the directories of runs that paths stand for, and paths that do not exist or can't be read."""
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        if _may_be_run(path):
            found.append(path)
        elif path.is_dir():
            others.append(path)
    if not found:
        raise ConfigError(
            "A plot shows runs.",
            expected="at least one directory of a run, which has a config.yaml",
            got=f"no config.yaml in {', '.join(map(str, paths))}"[:200] if paths else "none",
            remedy="Pass directories of runs; runs/* passes all that are in runs.",
        )
    if others:
        print(f"rayvec: left out, without a config.yaml: {', '.join(map(str, others))}", file=sys.stderr)
    return list(dict.fromkeys(found))


def _may_be_run(path: Path) -> bool:
    """Whether a path has settings, or `load_config` says why it can't be a run."""
    try:
        (path / "config.yaml").stat()
    except (FileNotFoundError, NotADirectoryError):
        return not os.path.exists(path)
    except OSError:  # such as a directory that may not be read
        pass
    return True


def _label(config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the algorithm, and the settings in which runs of the same algorithm and environment differ.

    Where presets differ, their names stand for the settings that have the values of the presets.
    """
    kin = [each for each in others if type(each) is type(config) and each.env_id == config.env_id]
    names = [row.name for row in describe(type(config)) if row.name not in _IGNORED_IN_GROUPS]
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
    path = Path(path)
    labels: dict[str, list[str]] = {}
    for each in groups:
        labels.setdefault(each.env_id, []).append(textwrap.fill(str(each), _LINE_CHARS))
    num_lines = max(sum(label.count("\n") + 1 for label in of_env) for of_env in labels.values())
    figure, panels = curves_figure(len(labels), height=4.2 + _LINE_INCHES * num_lines)
    known, kind = figure.canvas.get_supported_filetypes(), path.suffix[1:].lower() or "png"
    if kind not in known:
        raise ConfigError(
            "The end of a picture's name says its format.",
            expected=f"a name that ends in one of {', '.join(f'.{each}' for each in sorted(known))}",
            got=path,
            remedy="Pass --out curves.png, for example.",
        )
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
        figure.savefig(file, format=kind)


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
    axes.plot(grid, mean, style, color=color, linewidth=1.8, label=label)
    if len(runs) > 1:
        axes.fill_between(grid, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)
