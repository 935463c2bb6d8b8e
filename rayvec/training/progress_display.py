"""The progress of a run as a person sees it in the terminal."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn
from rich.table import Column

from rayvec.training.run_state import Progress

__all__ = ["ProgressDisplay", "progress_text"]

PLAIN_INTERVAL_S = 5.0
"""How often a line is printed where there is no terminal to draw a bar on."""
_BESIDE = 15
"""Columns of the bar and the remaining time at least, with what divides them."""


class ProgressDisplay:
    """Steps, steps/s, recent return and where the time goes: a bar on a terminal, elsewhere lines.

    There is a line every few seconds, and one for the last step.

    Args:
        total_steps: Steps at the end of the run.
        steps: Steps taken so far.
        file: The stream to write to; standard error if left out.
    """

    def __init__(self, total_steps: int, steps: int = 0, file: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._file = file or sys.stderr
        self._last_line_s = -math.inf
        self._line = ""  # the last one, if it has not been printed
        self._bar: Bar | None = None
        self._console = console = Console(file=self._file)
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.completed:,}/{task.total:,}"),
                BarColumn(None, table_column=Column(ratio=1)),  # in the room that the others leave
                TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
                TimeRemainingColumn(compact=True),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=min(steps, total_steps))
            self._bar.start()

    def begin(self, text: str) -> None:
        """Shows a text before the first steps are done."""
        if self._bar:
            self._bar.update(self._task, description=self._fitting(text))
        else:
            print(f"rayvec: {text}", file=self._file, flush=True)

    def show(self, steps: int, text: str) -> None:
        """Shows that `steps` are done, and `text` beside it."""
        if self._bar:
            self._bar.update(self._task, completed=min(steps, self._total_steps), description=self._fitting(text))
        else:
            self._line = f"{steps:,}/{self._total_steps:,} steps · {text}"
            if steps >= self._total_steps or time.monotonic() - self._last_line_s >= PLAIN_INTERVAL_S:
                self._last_line_s = time.monotonic()
                self._print()

    def _fitting(self, text: str) -> str:
        """Returns the parts of a text, divided by dots, that fit into a line beside bar and numbers of steps."""
        room = self._console.width - 2 * len(f"{self._total_steps:,}") - _BESIDE
        parts = text.split(" · ")
        while len(parts) > 1 and len(" · ".join(parts)) > room:
            parts.pop()
        return " · ".join(parts)

    def _print(self) -> None:
        if self._line:
            print(self._line, file=self._file, flush=True)
        self._line = ""

    def close(self) -> None:
        """Ends the bar, or prints the last line."""
        with contextlib.suppress(OSError):  # a terminal that was closed does not end the run
            if self._bar:
                self._bar.stop()
            self._print()


def progress_text(progress: Progress, metrics: Mapping[str, float | int | None], times_s: Mapping[str, float]) -> str:
    """Returns steps/s, recent return, greedy evaluation and shares of wall time, in one line.

    Args:
        progress: State of the run.
        metrics: Those of the present line of ``metrics.jsonl``.
        times_s: Wall time by activity.
    """
    mean_return = "none yet" if metrics["return_mean"] is None else f"{metrics['return_mean']:.2f}"
    own = "".join(f" · {name} {mean:.2f}" for name, mean in progress.metric_means().items())
    greedy = ""
    if (evaluated := metrics.get("eval/return_mean", progress.eval_return)) is not None:
        best = max(evaluated, evaluated if progress.best_return is None else progress.best_return)
        greedy = f" · greedy {evaluated:.2f}, best {best:.2f}"
    whole_s = sum(times_s.values())
    split = ", ".join(f"{name} {seconds / whole_s:.0%}" for name, seconds in times_s.items())
    return f"{metrics['steps_per_s']:,.0f} steps/s · return {mean_return}{own}{greedy} · {split}"
