"""What a person sees: tables, and a bar with the time that is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Ticker", "console", "show_table", "ticking"]

_WIDTH = 150


def console() -> Console:
    """Returns the terminal; what is no terminal gets lines that are long enough for our tables."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=_WIDTH)


class Ticker:
    """A bar over the seconds that a benchmark is expected to take."""

    def __init__(self, progress: Progress, total_s: float) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total_s, left="")
        self._done_s = 0.0

    def say(self, text: str) -> None:
        """Says what is being done."""
        self._progress.update(self._task, description=text)

    def advance(self, seconds: float) -> None:
        """Notes that something of so many expected seconds is done."""
        self._done_s += seconds
        task = self._progress.tasks[0]
        self._progress.advance(self._task, seconds)
        if task.elapsed and self._done_s:  # by the pace so far, which may differ from what was expected
            left_s = task.elapsed / self._done_s * max(0.0, (task.total or 0.0) - self._done_s)
            self._progress.update(self._task, left=f"{int(left_s // 60)}:{int(left_s % 60):02d} left")


@contextmanager
def ticking(total_s: float, terminal: Console) -> Iterator[Ticker]:
    """Shows a bar; it disappears in the end, and where nobody looks at a terminal there is none."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        yield Ticker(progress, total_s)


def show_table(terminal: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        right = any(_is_number(row[number]) for row in rows)
        table.add_column(name, justify="right" if right else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    terminal.print(table)


def _is_number(cell: Any) -> bool:
    return str(cell).replace(",", "").replace(".", "").replace("%", "").replace("*", "").strip().isdigit()
