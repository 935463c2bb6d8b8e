"""Output on the terminal: tables, and figures with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["number", "ratio", "show_table", "spread"]

_WIDTH = 200


class _Console(Console):
    """A console whose reader may end: the command line then ends with its own exit code, not with rich's."""

    def on_broken_pipe(self) -> None:
        """Raises the error again."""
        raise


def _console() -> Console:
    """Returns the terminal; output that is no terminal gets lines long enough for the tables."""
    made = _Console(highlight=False, markup=False)
    return made if made.is_terminal else _Console(highlight=False, markup=False, width=_WIDTH)


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a Markdown table below a title, numbers to the right."""
    table = Table(box=box.MARKDOWN)
    for place, name in enumerate(header):
        right = any(str(row[place])[:1] in "+-0123456789" for row in rows)
        table.add_column(name, justify="right" if right else "left")
    for row in rows:
        table.add_row(*map(str, row))
    terminal = _console()
    terminal.print(f"\n{title}")
    terminal.print(table)


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Returns the median with the smallest and the largest value.

    >>> spread([2, 1, 9], ".1f")
    '2.0 (1.0 to 9.0)'
    """
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})" if values else ""


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Returns the median of ratios, pair by pair, with the smallest and the largest."""
    return spread([a / b for a, b in zip(values, others, strict=True)], ".2f")


def number(value: float) -> str:
    """Returns a number as tables show it.

    >>> number(0.9504), number(952.381), number(30476.2)
    ('0.95', '952.38', '30,476')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
