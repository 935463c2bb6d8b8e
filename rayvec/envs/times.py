"""How long the steps and resets of an environment take."""

from __future__ import annotations


class Times:
    """Durations in seconds.

    Attributes:
        recent: Those that :meth:`fold` has not counted yet; the caller appends to it.
    """

    def __init__(self) -> None:
        self.recent: list[float] = []
        self._count, self._total_s, self._longest_s = 0, 0.0, 0.0

    def fold(self) -> tuple[int, float, float]:
        """Counts the recent ones. Returns how many there were in all, their mean and the longest in ms."""
        self._count += len(self.recent)
        self._total_s += sum(self.recent)
        self._longest_s = max(self._longest_s, *self.recent, 0.0)
        self.recent.clear()
        return self._count, 1e3 * self._total_s / max(1, self._count), 1e3 * self._longest_s
