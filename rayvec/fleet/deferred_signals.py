"""Defers Ctrl-C and SIGTERM until a block of statements has completed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

__all__ = ["Uninterrupted"]

_Handler = Callable[[int, FrameType | None], Any]


class Uninterrupted:
    """A context manager that defers the handlers of SIGINT and SIGTERM to the end of the block.

    Python handles signals only in the main thread. In other threads this context manager has no effect.

    Attributes:
        received: The signals that came within the block, by their numbers, and the stack frame of each.
    """

    def __enter__(self) -> Self:
        """Starts to defer signals."""
        self.received: dict[int, FrameType | None] = {}
        self._previous: dict[int, _Handler] = {}
        if threading.current_thread() is threading.main_thread():
            try:
                for number in (signal.SIGINT, signal.SIGTERM):
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._previous[number] = handler
                        signal.signal(number, self._receive)
            except BaseException:  # what a handler raised, before it was deferred
                self.__exit__()
                raise
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received[number] = frame

    def __exit__(self, *exc_info: object) -> None:
        """Restores all handlers, and then calls those whose signal came, whatever one of them raises."""
        if self._previous:
            number, handler = self._previous.popitem()
            try:
                try:
                    signal.signal(number, handler)
                finally:
                    self.__exit__()
            finally:
                if number in self.received:
                    handler(number, self.received[number])
