"""Ctrl-C that waits until a few statements are done."""

from __future__ import annotations

import signal
import threading
from types import FrameType

__all__ = ["Uninterrupted"]


class Uninterrupted:
    """A block of statements that Ctrl-C does not split: ``KeyboardInterrupt`` comes after it.

    Python handles signals in the main thread alone; in other threads this does nothing.
    """

    def __enter__(self) -> None:
        """Begins to hold Ctrl-C back."""
        self._received: tuple[int, FrameType | None] | None = None
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous):
                signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame

    def __exit__(self, *exc_info: object) -> None:
        """Lets Ctrl-C through, also one that came meanwhile."""
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            if self._received is not None:
                self._previous(*self._received)
