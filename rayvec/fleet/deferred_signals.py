"""Defers Ctrl-C and SIGTERM until a block of statements has completed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers the handlers of SIGINT and SIGTERM to the end of the block. There, each of them is called.

    Python handles signals only in the main thread. In other threads this context manager has no effect.
    """
    received: dict[int, Any] = {}

    def restore(number: int, handler: Any) -> None:
        try:
            signal.signal(number, handler)
        finally:
            if number in received:
                handler(number, received[number])

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.callback(restore, number, handler)
                    signal.signal(number, received.setdefault)
        yield
