"""Defers Ctrl-C and SIGTERM until a block of statements has completed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers the handlers of SIGINT and SIGTERM to the end of the block. There, each of them is called.

    Python handles signals only in the main thread. In other threads this context manager has no effect.
    """
    received: dict[int, Any] = {}
    is_main = threading.current_thread() is threading.main_thread()
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            if callable(signal.getsignal(number)):
                stack.callback(_raise_again, number, received)
                stack.callback(signal.signal, number, signal.signal(number, received.setdefault))
        yield


def _raise_again(number: int, received: dict[int, Any]) -> None:
    if number in received:
        signal.raise_signal(number)
