"""Output on the terminal: tables, and a progress bar with the remaining time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rayvec.bench.harness.split import STATES

__all__ = ["Ticker", "console", "number", "show_split", "show_table", "ticking"]

_WIDTH = 150
_MOST_UNATTRIBUTED = 0.05
_HYPHENATED = {
    "environment": "environ-\nment",
    "inference": "infer-\nence",
    "serialisation": "seriali-\nsation",
    "transport": "trans-\nport",
    "unattributed": "unattri-\nbuted",
}


def console() -> Console:
    """Returns the terminal; output that is no terminal gets lines long enough for the tables."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=_WIDTH)


class Ticker:
    """A progress bar over the expected seconds of a benchmark."""

    def __init__(self, progress: Progress, total_s: float) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total_s, left="")
        self._done_s = 0.0

    def say(self, text: str) -> None:
        """Shows what is being measured."""
        self._progress.update(self._task, description=text)

    def advance(self, seconds: float) -> None:
        """Adds expected seconds that are done."""
        self._done_s += seconds
        task = self._progress.tasks[0]
        self._progress.advance(self._task, seconds)
        if task.elapsed and self._done_s:  # by the pace so far, which may differ from what was expected
            left_s = task.elapsed / self._done_s * max(0.0, (task.total or 0.0) - self._done_s)
            self._progress.update(self._task, left=f"{int(left_s // 60)}:{int(left_s % 60):02d} left")


@contextmanager
def ticking(total_s: float, terminal: Console) -> Iterator[Ticker]:
    """Shows a progress bar while inside; output that is no terminal has none."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        yield Ticker(progress, total_s)


def show_table(
    terminal: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], *, sections: bool = False
) -> None:
    """Prints a table, numbers to the right, narrow enough for a hundred columns.

    Args:
        terminal: Where to.
        title: In a line of its own.
        header: Names of columns.
        rows: Their cells.
        sections: Whether a line divides rows whose first cells differ.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, name in enumerate(header):
        right = any(_is_number(row[number]) for row in rows)
        table.add_column(name, justify="right" if right else "left", vertical="bottom")
    for row, following in itertools.zip_longest(rows, rows[1:]):
        ends = sections and following is not None and row[0] != following[0]
        table.add_row(*(str(cell) for cell in row), end_section=ends)
    terminal.print(f"\n{title}\n")
    terminal.print(table)
    terminal.print()


def show_split(
    terminal: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[tuple[Sequence[Any], Mapping[str, float]]],
) -> None:
    """Prints a table of where time goes, in percent.

    Args:
        terminal: Where to.
        title: In a line of its own.
        header: Names of the columns before the states.
        rows: Their cells, and the share of each state.
    """
    show_table(
        terminal,
        title,
        (*header, *(_HYPHENATED.get(state, state) for state in STATES)),
        [(*cells, *(f"{100 * shares.get(state, 0.0):.1f}" for state in STATES)) for cells, shares in rows],
        sections=True,
    )
    for cells, shares in rows:
        if shares.get("unattributed", 0.0) > _MOST_UNATTRIBUTED:
            terminal.print(f"More than {_MOST_UNATTRIBUTED:.0%} is unattributed: {', '.join(map(str, cells))}")


def number(value: float) -> str:
    """Returns a number as tables show it.

    >>> number(0.9504), number(952.381), number(30476.2)
    ('0.95', '952.38', '30,476')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _is_number(cell: Any) -> bool:
    text = str(cell).translate(str.maketrans("", "", ",.%*()+-")).replace(" ", "")
    return text.isdigit()
