"""Output on the terminal: tables, figures with their spread, and a progress bar with the remaining time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rayvec.bench.harness.time_split import STATES

__all__ = ["console", "number", "ratio", "show_split", "show_table", "spread", "ticking"]

_WIDTH = 200
_MOST_UNATTRIBUTED = 0.05


class _Console(Console):
    """A console whose reader may end: the command line then ends with its own exit code, not with rich's."""

    def on_broken_pipe(self) -> None:
        """Raises the error again."""
        raise


def console() -> Console:
    """Returns the terminal; output that is no terminal gets lines long enough for the tables."""
    made = _Console(highlight=False, markup=False)
    return made if made.is_terminal else _Console(highlight=False, markup=False, width=_WIDTH)


@contextmanager
def ticking(total: float) -> Iterator[Callable[[str, float], None]]:
    """Shows a progress bar while inside, on a terminal.

    Args:
        total: Of all parts, in any unit, such as expected seconds.

    Yields:
        A function of what is measured from now on, and of the part that is done since the last call.
    """
    remaining = TimeRemainingColumn(), TextColumn("left")
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), *remaining
    terminal = console()
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal, speed_estimate_period=3600
    ) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda text, done: progress.update(task, description=text, advance=done)


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a Markdown table below a title, numbers to the right."""
    table = Table(box=box.MARKDOWN)
    for place, name in enumerate(header):
        right = any(str(row[place])[:1] in "+-0123456789" for row in rows)
        table.add_column(name, justify="right" if right else "left")
    for row in rows:
        table.add_row(*map(str, row))
    terminal = console()
    terminal.print(f"\n{title}")
    terminal.print(table)


def show_split(title: str, header: Sequence[str], rows: Sequence[tuple[Sequence[Any], Mapping[str, float]]]) -> None:
    """Prints a table of where time goes, in percent.

    Args:
        title: In a line of its own.
        header: Names of the columns before the states.
        rows: Their cells, and the share of each state.
    """
    cells = [(*of_row, *(f"{100 * shares.get(state, 0.0):.1f}" for state in STATES)) for of_row, shares in rows]
    show_table(title, (*header, *STATES), cells)
    for of_row, shares in rows:
        if shares.get("unattributed", 0.0) > _MOST_UNATTRIBUTED:
            console().print(f"More than {_MOST_UNATTRIBUTED:.0%} is unattributed: {', '.join(map(str, of_row))}")


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
