"""Pictures of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from rayvec.bench.harness.time_split import STATES
from rayvec.bench.results import old_design

__all__ = ["plot_scaling", "series"]

Row = dict[str, Any]
_COLORS = {
    "rayvec-worker": "#0b5fa5",
    "rayvec-decentralized": "#00876c",
    "rayvec-driver": "#56a3dd",
    "tianshou-ray": "#c23b22",
    "tianshou-subproc": "#e08214",
    "tianshou-shmem": "#b8860b",
    "gymnasium-async": "#7b3294",
    "gymnasium-sync": "#c2a5cf",
    "upper-bound": "#444444",
    "old design": "#c23b22",
}
_STATE_COLORS = ("#2a9d55", "#8fd694", "#f2c14e", "#56a3dd", "#c23b22", "#7b3294", "#bbbbbb")


def series(row: Row) -> str:
    """Returns the way of a row, and where it was measured if that is on hosts."""
    return f"{row['way']}, hosts" if row.get("place") == "hosts" else str(row["way"])


def plot_scaling(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Draws efficiency over nodes, steps/s over nodes, and the time split; returns the files."""
    durations = sorted({row["step_duration_s"] for row in rows}, reverse=True)
    hollow = "; hollow: more cores than this machine can emulate" if any(row["marked"] for row in rows) else ""
    most = max(row["nodes"] for row in rows)
    at_most = [row for row in rows if row["nodes"] == most]
    ways = sorted({series(row) for row in at_most if row["way"] != "upper-bound"}) or ["upper-bound"]
    figures: dict[str, tuple[str, float, Callable[[Any, float], None]]] = {
        "efficiency": (f"Efficiency: steps/s / (cores / step duration){hollow}", 3.6, partial(_efficiency, rows)),
        "steps": (f"Steps/s over nodes{hollow}", 3.6, partial(_steps, rows)),
        "split": (f"Where the time goes, nodes: {most}", 2.1 + 0.45 * len(ways), partial(_split, at_most, ways)),
    }
    for name, (title, height, draw) in figures.items():
        figure = Figure(figsize=(max(4.2 * len(durations), 6.0), height), layout="constrained")
        axes = figure.subplots(1, len(durations), squeeze=False)[0]
        for axis, step_s in zip(axes, durations, strict=True):
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
            axis.set_title(f"step {step_s:g} s")
            draw(axis, step_s)
        handles, labels = axes[0].get_legend_handles_labels()
        width = 0.7 + 0.075 * max(map(len, labels))  # inches of a column
        columns = min(len(labels), max(2, int(figure.get_figwidth() / width)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.suptitle(title)
        figure.savefig(directory / f"{name}.png", dpi=130)
    return [directory / f"{name}.png" for name in figures]


def _over_nodes(rows: Sequence[Row], axis: Any, step_s: float, value: str, scale: float) -> None:
    """Draws a value of each way over nodes; the upper bound is the same on hosts."""
    for name in dict.fromkeys(map(series, rows)):
        way, _, on_hosts = name.partition(", ")
        if way == "upper-bound" and on_hosts:
            continue
        mine = [row for row in rows if series(row) == name and row["step_duration_s"] == step_s]
        mine, color = sorted(mine, key=lambda row: row["nodes"]), _COLORS.get(way, "#888888")
        points = [row["nodes"] for row in mine], [scale * row[value] for row in mine]
        axis.plot(*points, "--" if way == "upper-bound" else "-." if on_hosts else "-", label=name, color=color)
        faces, marker = ["white" if row["marked"] else color for row in mine], "s" if on_hosts else "o"
        size = 0 if way == "upper-bound" else 16
        axis.scatter(*points, s=size, marker=marker, facecolors=faces, edgecolors=color, zorder=3)
    axis.set(xlabel="nodes")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _efficiency(rows: Sequence[Row], axis: Any, step_s: float) -> None:
    _over_nodes(rows, axis, step_s, "efficiency", 100.0)
    old = [row for row in old_design() if row["step_duration_s"] == step_s]
    points = [row["nodes"] for row in old], [row["efficiency_percent"] for row in old]
    axis.plot(*points, "x:", color=_COLORS["old design"], label="old design, 48 cores a node")
    axis.set(ylabel="efficiency, %", ylim=(0, 105))


def _steps(rows: Sequence[Row], axis: Any, step_s: float) -> None:
    _over_nodes(rows, axis, step_s, "steps_per_s", 1.0)
    ideal = {row["nodes"]: row["ideal_steps_per_s"] for row in rows if row["step_duration_s"] == step_s}
    axis.plot(sorted(ideal), sorted(ideal.values()), ":", color="black", label="ideal")
    axis.set(ylabel="steps/s", yscale="log")


def _split(rows: Sequence[Row], ways: Sequence[str], axis: Any, step_s: float) -> None:
    splits = {series(row): row["split"] for row in rows if row["step_duration_s"] == step_s}
    left = np.zeros(len(ways))
    for state, color in zip(STATES, _STATE_COLORS, strict=True):
        shares = [100 * splits.get(way, {}).get(state, 0.0) for way in ways]
        axis.barh(ways, shares, left=left, color=color, label=state)
        left += shares
    axis.set(xlabel="% of the cores' time", xlim=(0, 100))
    axis.invert_yaxis()
