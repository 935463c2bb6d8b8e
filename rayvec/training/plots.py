"""Returns over environment steps, drawn by matplotlib: of one run, and of several with the spread of their seeds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.config import ADJUSTABLE, TrainConfig
from rayvec.config.schema import fields_of
from rayvec.errors import ConfigError, require
from rayvec.training.atomic_files import local_path, written_whole
from rayvec.training.run_dir import load_config, load_result, read_metrics

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


def draw_learning_curve(run_dir: Path) -> None:
    """Draws ``learning_curve.png`` of a run, as `plot_runs` does."""
    run = _read(run_dir)
    plot_runs([Curves(run.config.algorithm.upper(), run.config.env_id, [run])], run_dir / "learning_curve.png")


def read_runs(run_dirs: Iterable[Path | str]) -> list[Curves]:
    """Returns the curves of runs, grouped by the settings that decide what is learned.

    Files are left out. So are directories that can't be read as runs, or in which no episode has ended; lines on
    standard error name them.

    Raises:
        ConfigError: No run is left.
    """
    runs = []
    for run_dir in dict.fromkeys(local_path(each) for each in run_dirs if not os.path.isfile(each)):
        try:
            run = _read(run_dir)
            require(run.training.size > 0, "no episode has ended")
            runs.append(run)
        except ConfigError as error:
            print(f"rayvec: left out {run_dir}: {error}", file=sys.stderr)
        except (
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # of files that another program has changed
            print(f"rayvec: left out {run_dir}: its metrics or result are damaged ({error!r})", file=sys.stderr)
    require(bool(runs), "There is no run to plot. Pass directories of runs, such as runs/*.")
    groups: dict[tuple[str, str], list[_Run]] = {}
    for run in runs:
        groups.setdefault((run.config.env_id, _label(run.config, [each.config for each in runs])), []).append(run)
    return [Curves(label, env_id, members) for (env_id, label), members in groups.items()]


def _read(run_dir: Path) -> _Run:
    """Reads a run. Returns are smoothed: a mean over about a twelfth of the run, weighted by numbers of episodes."""
    config, result, lines = load_config(run_dir), load_result(run_dir), list(read_metrics(run_dir / "metrics.jsonl"))
    ended = [(line["steps"], line["return_sum"], line["episodes"]) for line in lines if line.get("episodes")]
    steps, sums, episodes = np.array(ended, np.float64).reshape(-1, 3).T
    reach = max(1, len(steps) // 25)
    total, weight = (np.convolve(np.pad(each, reach), np.ones(2 * reach + 1), "valid") for each in (sums, episodes))
    smooth = total / weight if ended else sums
    evaluated = [(line["steps"], line["eval/return_mean"]) for line in lines if "eval/return_mean" in line]
    final = result.get("eval_return_mean")
    if final is not None:
        evaluated.append((result["total_steps"], final))
    return _Run(config, np.array([steps, smooth]), np.array(evaluated, np.float64).reshape(-1, 2).T, final)


def _label(config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the algorithm, and the settings in which runs of the same algorithm and environment differ."""
    related = [each for each in others if type(each) is type(config) and each.env_id == config.env_id]
    names = [name for name in fields_of(type(config)) if name not in _IGNORED_IN_GROUPS]
    differing = [name for name in names if len({str(getattr(each, name)) for each in related}) > 1]
    return ", ".join([config.algorithm.upper(), *(f"{name}={getattr(config, name)}" for name in differing)])


def plot_runs(groups: Sequence[Curves], path: Path | str) -> None:
    """Draws returns over steps, smoothed, one panel for each environment and one line for each group.

    The line is the mean over runs; the area around it is one standard deviation wide in both directions, whose divisor
    is the number of runs. Lines end where the shortest run of their group does. Greedy evaluations are dashed.

    Args:
        groups: The runs.
        path: The picture; its suffix names the format, by default PNG.

    Raises:
        ConfigError: matplotlib writes no such format, or the file can't be made.
        OSError: The disk is full.
    """
    from matplotlib.figure import Figure  # here: loading it would delay a run's start

    path, env_ids = local_path(path), list(dict.fromkeys(group.env_id for group in groups))
    figure = Figure(figsize=(8, 4.5 * len(env_ids)), dpi=150, layout="constrained")
    for axes, env_id in zip(figure.subplots(len(env_ids), squeeze=False).flat, env_ids, strict=True):
        for number, group in enumerate(each for each in groups if each.env_id == env_id):
            _draw(axes, [run.training for run in group.runs], color=f"C{number}", label=str(group))
            _draw(axes, [run.evaluations for run in group.runs], color=f"C{number}", linestyle="--", marker=".")
        axes.set(title=env_id, xlabel="environment steps (dashed: greedy evaluations)", ylabel="return")
        axes.legend(fontsize="small")
    with written_whole(path) as file:
        try:
            figure.savefig(file, format=path.suffix[1:].lower() or "png")
        except ValueError as error:
            raise ConfigError(f"{path} is no picture: {error}. Pass a name such as curves.png.") from None


def _draw(axes: Any, runs: Sequence[NDArray[np.float64]], **style: Any) -> None:
    if not all(run.size for run in runs):
        runs = [np.full((2, 1), np.nan)]  # it has a label in the legend
    end = min(run[0, -1] for run in runs)
    grid = np.unique([step for run in runs for step in run[0] if step <= end])
    values = np.array([np.interp(grid, *run) for run in runs])
    mean, spread = values.mean(0), values.std(0)
    axes.plot(grid, mean, **{"marker": "o" if len(grid) == 1 else None, **style})  # one point has no line
    axes.fill_between(grid, mean - spread, mean + spread, color=style["color"], alpha=0.2)
