"""What Ctrl-C does: it ends a command at once, except where the first one is a request to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import types
from collections.abc import Iterator

__all__ = ["Interrupts"]


class Interrupts:
    """Lets no Ctrl-C be lost while it is entered.

    A press raises KeyboardInterrupt. Python drops that exception where it can't be raised (a destructor, a callback
    of a C library), and libraries turn it into errors of their own. Therefore a press is remembered: the block ends
    with a KeyboardInterrupt in these cases too.

    Signals belong to the main thread: in another one, nothing changes.

    Attributes:
        requested: Whether Ctrl-C was pressed while it was `deferred`.
    """

    def __init__(self) -> None:
        self.requested = False
        self._raised = self._deferred = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupts:
        if self._in_main_thread:
            self._previous = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._previous)
        if not isinstance(error, KeyboardInterrupt):
            self.check(error)

    def check(self, error: BaseException | None = None) -> None:
        """Raises the KeyboardInterrupt that was dropped, or that became `error`."""
        if self._raised:
            interrupt = KeyboardInterrupt()
            for note in getattr(error, "__notes__", []):
                interrupt.add_note(note)
            raise interrupt from error

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes the first Ctrl-C a request to stop; the second one raises KeyboardInterrupt."""
        self.check()
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _pressed(self, signum: int, frame: types.FrameType | None) -> None:
        if self._deferred and not self.requested:
            self.requested = True
            with contextlib.suppress(RuntimeError):  # it came within a print to standard error
                print("\nfinishing the current iteration; Ctrl-C again stops at once", file=sys.stderr)
        else:
            self._raised = True
            raise KeyboardInterrupt
