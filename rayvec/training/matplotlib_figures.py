"""Figures of curves over environment steps, drawn by matplotlib without a screen."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["BLUE", "COLORS", "ORANGE", "curves_figure"]

COLORS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#bbbbbb")
BLUE, ORANGE = COLORS[:2]


def curves_figure(count: int = 1, *, columns: int = 1, height: float = 4.5) -> tuple[Any, list[Any]]:
    """Returns a new figure and its axes, for savefig.

    Args:
        count: Number of axes.
        columns: In how many columns they are arranged.
        height: Of each, in inches; the figure is 8 inches wide.
    """
    from matplotlib.figure import Figure  # here: loading it would delay a run's start
    from matplotlib.ticker import EngFormatter

    num_rows = -(-count // columns)
    figure = Figure(figsize=(8, height * num_rows), dpi=150, layout="constrained")
    axes = list(np.ravel(figure.subplots(num_rows, columns, squeeze=False)))
    for each in axes[count:]:
        each.set_visible(False)
    for each in axes[:count]:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25, linewidth=0.6)
        each.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, axes[:count]
