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


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    return path


def plot_scaling(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Draws efficiency over nodes, steps/s over nodes, and the time split; returns where."""
    return [
        _plot_efficiency(rows, directory / "efficiency.png"),
        _plot_steps(rows, directory / "steps.png"),
        _plot_split(rows, directory / "split.png"),
    ]


def _durations(rows: Sequence[Row]) -> list[float]:
    return sorted({row["step_duration_s"] for row in rows}, reverse=True)


def _lines(axis: Any, rows: Sequence[Row], step_s: float, value: str, scale: float = 1.0) -> None:
    for way in dict.fromkeys(row["way"] for row in rows):
        points = sorted(
            (r["nodes"], scale * r[value]) for r in rows if (r["way"], r["step_duration_s"]) == (way, step_s)
        )
        style = {"linestyle": "--"} if way == "floor" else {"marker": "o"}
        if points:
            axis.plot(*zip(*points, strict=True), label=way, color=_COLORS.get(way), markersize=4, **style)
        hollow = [
            (r["nodes"], scale * r[value])
            for r in rows
            if (r["way"], r["step_duration_s"]) == (way, step_s) and r["marked"] and way != "floor"
        ]
        if hollow:
            axis.plot(*zip(*hollow, strict=True), "o", color=_COLORS.get(way), markersize=4, markerfacecolor="white")
    axis.set_title(f"step {step_s:g} s")
    axis.set_xscale("log", base=2)
    _whole_ticks(axis, {row["nodes"] for row in rows})
    axis.set_xlabel("nodes")


def _hollow_means(rows: Sequence[Row]) -> str:
    """Explains hollow points where there are any."""
    return "; hollow: more cores than this machine can emulate" if any(row["marked"] for row in rows) else ""


def _whole_ticks(axis: Any, values: set[int]) -> None:
    axis.set_xticks(sorted(values), [str(value) for value in sorted(values)])
    axis.minorticks_off()


def _plot_efficiency(rows: Sequence[Row], path: Path) -> Path:
    durations = _durations(rows)
    figure, axes = _figure(len(durations))
    old = old_design()
    for axis, step_s in zip(axes, durations, strict=True):
        _lines(axis, rows, step_s, "efficiency", 100.0)
        points = [(row["nodes"], row["efficiency_percent"]) for row in old if row["step_duration_s"] == step_s]
        if points:
            color = _COLORS["old design"]
            axis.plot(*zip(*points, strict=True), ":", marker="x", color=color, label="old design, 48 cores a node")
            _whole_ticks(axis, {row["nodes"] for row in rows} | {int(n) for n, _ in points})
        axis.set_ylim(0, 105)
    axes[0].set_ylabel("efficiency, %")
    _legend(figure, axes)
    figure.suptitle("Steps/s over (cores / step duration)" + _hollow_means(rows))
    return _save(figure, path)


def _plot_steps(rows: Sequence[Row], path: Path) -> Path:
    durations = _durations(rows)
    figure, axes = _figure(len(durations))
    for axis, step_s in zip(axes, durations, strict=True):
        _lines(axis, rows, step_s, "steps_per_s")
        ideal = sorted({(row["nodes"], row["ideal_steps_per_s"]) for row in rows if row["step_duration_s"] == step_s})
        axis.plot(*zip(*ideal, strict=True), ":", color="black", label="ideal")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("steps/s")
    _legend(figure, axes)
    figure.suptitle("Steps/s over nodes" + _hollow_means(rows))
    return _save(figure, path)


def _plot_split(rows: Sequence[Row], path: Path) -> Path:
    most = max(row["nodes"] for row in rows)
    chosen = [row for row in rows if row["nodes"] == most and row["way"] != "floor"]
    ways = list(dict.fromkeys(row["way"] for row in chosen)) or ["floor"]
    durations = _durations(rows)
    figure, axes = _figure(len(durations), height=2.1 + 0.45 * len(ways))
    for axis, step_s in zip(axes, durations, strict=True):
        for place, way in enumerate(ways):
            row = next((r for r in chosen if (r["way"], r["step_duration_s"]) == (way, step_s)), None)
            left = 0.0
            for state, color in zip(STATES, _STATE_COLORS, strict=True):
                share = 100 * (row["split"].get(state, 0.0) if row else 0.0)
                axis.barh(place, share, left=left, color=color, label=state if place == 0 else None)
                left += share
        axis.set_title(f"step {step_s:g} s")
        axis.set_yticks(range(len(ways)), ways if axis is axes[0] else [""] * len(ways))
        axis.set_xlabel("% of the cores' time")
        axis.set_xlim(0, 100)
        axis.invert_yaxis()
    _legend(figure, axes)
    figure.suptitle(f"Where the time goes on {most} node{'s' if most > 1 else ''}")
    return _save(figure, path)
