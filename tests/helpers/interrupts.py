"""Ctrl-C at a given line."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted_at(number: int, function: Callable[[], Any], *folders: str) -> Any:
    """Calls a function, with Ctrl-C at so many lines of files in some folders; returns None if it came so far."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not any(folder in frame.f_code.co_filename for folder in folders):
            return None
        if event == "line" and next(lines) == number:
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        return function()
    except KeyboardInterrupt:
        return None
    finally:
        sys.settrace(None)
