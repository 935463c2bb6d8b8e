"""The picture of `rayvec bench scaling`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from rayvec.bench.results import actor_per_env

_COLORS = {"driver": "#56a3dd", "worker": "#0b5fa5", "decentralized": "#00876c", "actor per env": "#c23b22"}


def plot_efficiency(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws efficiency over nodes, an axis for each step duration, beside one Ray actor for each environment."""
    durations = sorted({row["step_duration_s"] for row in rows}, reverse=True)
    figure = Figure(figsize=(max(4.2 * len(durations), 6.0), 3.6), layout="constrained")
    for axis, step_s in zip(figure.subplots(1, len(durations), squeeze=False)[0], durations, strict=True):
        here = sorted((row for row in rows if row["step_duration_s"] == step_s), key=lambda row: row["nodes"])
        for way in dict.fromkeys(row["way"] for row in rows):
            mine = [row for row in here if row["way"] == way]
            points = [row["nodes"] for row in mine], [100 * row["efficiency"] for row in mine]
            axis.plot(*points, label=f"rayvec, {way}", color=_COLORS[way])
            faces = ["white" if row["is_overloaded"] else _COLORS[way] for row in mine]
            axis.scatter(*points, s=16, facecolors=faces, edgecolors=_COLORS[way], zorder=3)
        published = [row for row in actor_per_env() if row["step_duration_s"] == step_s]
        points = [row["nodes"] for row in published], [row["efficiency_percent"] for row in published]
        axis.plot(*points, "x:", color=_COLORS["actor per env"], label="one Ray actor per environment, 48 cores a node")
        axis.set(title=f"step {step_s:.3g} s", xlabel="nodes", ylabel="efficiency, %", ylim=(0, 105))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    hollow = "; hollow: more cores than this machine can emulate" if any(row["is_overloaded"] for row in rows) else ""
    figure.suptitle(f"Efficiency: steps/s / (cores / step duration){hollow}")
    figure.savefig(path, dpi=130)
