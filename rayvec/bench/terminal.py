"""Output on the terminal: tables, and figures with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

_NUMERIC = "+-0123456789"


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a Markdown table below a title, numbers to the right."""
    columns = []
    for name, *cells in zip(header, *rows, strict=True):
        texts = list(map(str, cells))
        width, is_number = max(map(len, [name, *texts])), any(text[:1] in _NUMERIC for text in texts if text)
        rule = "-" * (width - is_number) + ":" * is_number
        columns.append([f"{text:{'>' if is_number else '<'}{width}}" for text in (name, rule, *texts)])
    print(f"\n{title}\n")
    for line in zip(*columns, strict=True):
        print(f"| {' | '.join(line)} |")


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
