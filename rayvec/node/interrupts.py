"""Defers Ctrl-C until a block of statements has completed."""

from __future__ import annotations

import signal
import threading
from types import FrameType

__all__ = ["Uninterrupted"]


class Uninterrupted:
    """A context manager that defers ``KeyboardInterrupt`` to the end of the block.

    Python handles signals only in the main thread. In other threads this context manager has no effect.
    """

    def __enter__(self) -> None:
        """Starts to defer Ctrl-C."""
        self._received: tuple[int, FrameType | None] | None = None
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous):
                signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame

    def __exit__(self, *exc_info: object) -> None:
        """Restores the signal handler and delivers a deferred Ctrl-C."""
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            if self._received is not None:
                self._previous(*self._received)
