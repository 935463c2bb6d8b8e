"""Pictures of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from rayvec.bench.harness.split import STATES
from rayvec.bench.results import old_design

__all__ = ["plot_scaling"]

Row = dict[str, Any]
_COLORS = {
    "rayvec-worker": "#0b5fa5",
    "rayvec-driver": "#56a3dd",
    "tianshou-ray": "#c23b22",
    "tianshou-subproc": "#e08214",
    "tianshou-shmem": "#b8860b",
    "gymnasium-async": "#7b3294",
    "gymnasium-sync": "#c2a5cf",
    "floor": "#444444",
    "old design": "#c23b22",
}
_STATE_COLORS = ("#2a9d55", "#8fd694", "#f2c14e", "#56a3dd", "#c23b22", "#7b3294", "#bbbbbb")


def _figure(columns: int, height: float = 3.6) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(max(4.2 * columns, 6.0), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, list(axes)


def _legend(figure: Figure, axes: Sequence[Any]) -> None:
    """One legend below, in as many columns as there is room for."""
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(len(labels), max(3, int(figure.get_figwidth() / 1.9)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def plot_scaling(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Draws efficiency over nodes, steps/s over nodes, and the time split; returns the files."""
    durations = sorted({row["step_duration_s"] for row in rows}, reverse=True)
    efficiency, steps = (_over_nodes(rows, durations, what) for what in ("efficiency", "steps_per_s"))
    figures = {"efficiency": efficiency, "steps": steps, "split": _split(rows, durations)}
    for name, figure in figures.items():
        figure.savefig(directory / f"{name}.png", dpi=130)
    return [directory / f"{name}.png" for name in figures]


def _over_nodes(rows: Sequence[Row], durations: Sequence[float], value: str) -> Figure:
    """Draws efficiency in percent with the old design, or steps/s with the ideal."""
    figure, axes = _figure(len(durations))
    for axis, step_s in zip(axes, durations, strict=True):
        here = sorted((row for row in rows if row["step_duration_s"] == step_s), key=lambda row: row["nodes"])
        counts = {row["nodes"] for row in rows}
        scale = 100.0 if value == "efficiency" else 1.0
        for way in dict.fromkeys(row["way"] for row in here):
            mine, color = [row for row in here if row["way"] == way], _COLORS.get(way, "#888888")
            points = [row["nodes"] for row in mine], [scale * row[value] for row in mine]
            axis.plot(*points, "--" if way == "floor" else "-", label=way, color=color)
            faces = ["white" if row["marked"] else color for row in mine]
            axis.scatter(*points, s=0 if way == "floor" else 16, facecolors=faces, edgecolors=color, zorder=3)
        if value == "efficiency":
            old = [row for row in old_design() if row["step_duration_s"] == step_s]
            if old:
                points = [row["nodes"] for row in old], [row["efficiency_percent"] for row in old]
                axis.plot(*points, "x:", color=_COLORS["old design"], label="old design, 48 cores a node")
                counts |= {int(row["nodes"]) for row in old}
            axis.set_ylim(0, 105)
        else:
            ideal = {row["nodes"]: row["ideal_steps_per_s"] for row in here}
            axis.plot(ideal.keys(), ideal.values(), ":", color="black", label="ideal")
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set(title=f"step {step_s:g} s", xlabel="nodes")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(counts), [str(count) for count in sorted(counts)])
        axis.minorticks_off()
    axes[0].set_ylabel("efficiency, %" if value == "efficiency" else "steps/s")
    _legend(figure, axes)
    title = "Steps/s over (cores / step duration)" if value == "efficiency" else "Steps/s over nodes"
    hollow = "; hollow: more cores than this machine can emulate" if any(row["marked"] for row in rows) else ""
    figure.suptitle(title + hollow)
    return figure


def _split(rows: Sequence[Row], durations: Sequence[float]) -> Figure:
    most = max(row["nodes"] for row in rows)
    chosen = {(row["way"], row["step_duration_s"]): row for row in rows if row["nodes"] == most}
    ways = list(dict.fromkeys(way for way, _ in chosen if way != "floor")) or ["floor"]
    figure, axes = _figure(len(durations), height=2.1 + 0.45 * len(ways))
    for axis, step_s in zip(axes, durations, strict=True):
        left = [0.0] * len(ways)
        for state, color in zip(STATES, _STATE_COLORS, strict=True):
            found = [chosen.get((way, step_s), {"split": {}})["split"] for way in ways]
            shares = [100 * split.get(state, 0.0) for split in found]
            axis.barh(range(len(ways)), shares, left=left, color=color, label=state)
            left = [before + share for before, share in zip(left, shares, strict=True)]
        axis.set(title=f"step {step_s:g} s", xlabel="% of the cores' time", xlim=(0, 100))
        axis.set_yticks(range(len(ways)), ways if axis is axes[0] else [""] * len(ways))
        axis.invert_yaxis()
    _legend(figure, axes)
    figure.suptitle(f"Where the time goes on {most} node{'s' if most > 1 else ''}")
    return figure
