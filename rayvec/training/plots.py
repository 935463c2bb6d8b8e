"""Curves of several runs: those that differ in their seed alone are one line, with the spread of its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.config import ADJUSTABLE, TrainConfig
from rayvec.config.schema import describe
from rayvec.errors import ConfigError
from rayvec.training.atomic_files import written_whole
from rayvec.training.learning_curve import points_of, sound, training_points
from rayvec.training.loggers import read_metrics
from rayvec.training.matplotlib_figures import COLORS, curves_figure
from rayvec.training.run_dir import load_config, load_result

__all__ = ["Curves", "plot_runs", "read_runs"]

_POINTS = 200
_OWN = {"seed", "run_dir", "env_id", "num_envs", "init_from", *ADJUSTABLE}
"""Settings that do not tell groups of runs apart, or whose values say nothing to a reader."""


@dataclass(frozen=True)
class Curves:
    """Runs that differ in their seed alone.

    Attributes:
        label: Algorithm, and the settings in which other runs of the same environment differ.
        env_id: Their environment.
        training: Of each run, steps and smoothed returns of episodes in training, ``float64 [2, L]``.
        evaluations: Of each run, steps and mean returns of greedy evaluations during training, ``float64 [2, E]``.
        final: Mean returns of the greedy evaluations after training, of the runs that have ended.
    """

    label: str
    env_id: str
    training: list[NDArray[np.float64]]
    evaluations: list[NDArray[np.float64]]
    final: list[float]

    def __str__(self) -> str:
        """The label, the number of seeds, and the greedy return where runs have ended."""
        count = len(self.training)
        text = f"{self.label} ({count} seed{'s' * (count > 1)})"
        if self.final:
            text += f": greedy {np.mean(self.final):.1f}" + (f" ± {np.std(self.final):.1f}" * (len(self.final) > 1))
        return text


def read_runs(run_dirs: Sequence[Path]) -> list[Curves]:
    """Returns the curves of runs, grouped; files, such as a picture beside the runs, are left out.

    Raises:
        ConfigError: There are none, one is not the directory of a run, or no episode has ended in it.
    """
    paths, run_dirs = run_dirs, [run_dir for run_dir in run_dirs if not run_dir.is_file()]
    if not run_dirs:
        raise ConfigError(
            "A plot shows runs.",
            expected="at least one directory of a run",
            got=f"only files: {', '.join(map(str, paths))}"[:200] if paths else "none",
            remedy="Pass some, for example rayvec plot runs/*",
        )
    configs = {run_dir: load_config(run_dir) for run_dir in run_dirs}
    groups: dict[tuple[str, str], list[Path]] = {}
    for run_dir, config in configs.items():
        groups.setdefault((config.env_id, _label(config, list(configs.values()))), []).append(run_dir)
    found = []
    for (env_id, label), members in groups.items():
        read = [list(sound(read_metrics(run_dir / "metrics.jsonl"))) for run_dir in members]
        curves = [training_points(lines)[:2] for lines in read]
        for run_dir, points in zip(members, curves, strict=True):
            if not points.size:
                raise ConfigError(
                    "A curve is made of episodes.",
                    expected=f"episodes that have ended, in {run_dir / 'metrics.jsonl'}",
                    got="none",
                    remedy="Leave this run out, or let it train for longer.",
                )
        evaluations = [points_of(lines, "eval/return_mean") for lines in read]
        greedy = [load_result(run_dir).get("eval_return_mean") for run_dir in members]
        finals = [value for value in greedy if value is not None]
        found.append(Curves(label, env_id, curves, evaluations, finals))
    return found


def _label(config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the algorithm, and the settings in which runs of the same algorithm and environment differ."""
    kin = [each for each in others if type(each) is type(config) and each.env_id == config.env_id]
    names = [row.name for row in describe(type(config)) if row.name not in _OWN or row.name == "num_envs"]
    differing = [name for name in names if len({str(getattr(each, name)) for each in kin}) > 1]
    return ", ".join([config.algorithm.upper(), *(f"{name}={getattr(config, name)}" for name in differing)])


def plot_runs(groups: Sequence[Curves], path: Path) -> None:
    """Draws returns over steps, smoothed, one panel for each environment and one line for each group.

    The line is the mean over seeds; the area around it is one standard deviation wide in both directions. Lines end
    where the shortest run of their group does. Greedy evaluations during training are dashed.

    Args:
        groups: The runs.
        path: The picture; its suffix names the format, by default PNG.

    Raises:
        ConfigError: matplotlib writes no such format.
    """
    env_ids = list(dict.fromkeys(each.env_id for each in groups))
    figure, panels = curves_figure(len(env_ids), height=4.2)
    known, kind = figure.canvas.get_supported_filetypes(), path.suffix[1:].lower() or "png"
    if kind not in known:
        raise ConfigError(
            "The end of a picture's name says its format.",
            expected=f"a name that ends in one of {', '.join(f'.{each}' for each in sorted(known))}",
            got=path,
            remedy="Pass --out curves.png, for example.",
        )
    for axes, env_id in zip(panels, env_ids, strict=True):
        for number, group in enumerate(each for each in groups if each.env_id == env_id):
            color = COLORS[number % len(COLORS)]
            _draw(axes, group.training, color, "-", str(group))
            if all(each.size for each in group.evaluations):
                _draw(axes, group.evaluations, color, "--", None)
        axes.set(title=env_id, ylabel="return (sum of rewards in an episode)")
        axes.set_xlim(left=0)
        axes.legend(frameon=False, loc="best", fontsize=8)
    axes.set_xlabel("environment steps (solid: training; dashed: greedy evaluations during training)")
    with written_whole(path) as file:
        figure.savefig(file, format=kind)


def _draw(axes: Any, runs: Sequence[NDArray[np.float64]], color: str, style: str, label: str | None) -> None:
    grid = np.linspace(max(run[0, 0] for run in runs), min(run[0, -1] for run in runs), _POINTS)
    if grid[0] > grid[-1]:  # the shortest run ends before another one has its first episode
        return
    values = np.array([np.interp(grid, *run) for run in runs])
    mean, spread = values.mean(0), values.std(0)
    axes.plot(grid, mean, style, color=color, linewidth=1.8, label=label)
    if len(runs) > 1:
        axes.fill_between(grid, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)
