"""How long a process has waited for another, without the time in which it was stopped itself."""

from __future__ import annotations

import time

__all__ = ["WaitedTime"]

_MOST_S = 1.0
"""The most that counts of the time between two looks."""


class WaitedTime:
    """The sum of the times between looks, of each at most a second.

    A suspended job (SIGSTOP, ``docker pause``, ``scontrol suspend``) stops the process that waits together with the
    one that it waits for. By a clock alone the pause would count as waiting, and a limit could be exceeded at once when
    the job continues. Look at least once a second: with rarer looks, a limit takes longer than its seconds.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins at 0."""
        self.seconds = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> float:
        """Adds the time since the last look; returns the sum in seconds."""
        now_s = time.monotonic()
        self.seconds += min(now_s - self._looked_s, _MOST_S)
        self._looked_s = now_s
        return self.seconds
