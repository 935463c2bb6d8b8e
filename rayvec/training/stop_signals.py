"""What Ctrl-C and SIGTERM do: they end a command at once, except where the first one is a request to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import types
from collections.abc import Iterator


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which schedulers, containers and spot instances announce that they will kill a process."""


class Interrupts:
    """Lets no Ctrl-C be lost while it is entered.

    A press raises KeyboardInterrupt. Python drops that exception where it can't be raised (a destructor, a callback
    of a C library), and libraries turn it into errors of their own. Therefore a press is remembered: the block ends
    with a KeyboardInterrupt in these cases too.

    SIGTERM counts as Ctrl-C in `taking_sigterm` and while a press is `deferred`, unless your program has a handler for
    it. The second signal of the same kind ends the block at once: what ends a job may send several kinds.

    Signals belong to the main thread: in another one, nothing changes.

    Attributes:
        requested: Whether Ctrl-C was pressed, or SIGTERM came, while it was `deferred`.
        kind: What the latest signal raises.
    """

    def __init__(self) -> None:
        self.requested = False
        self._raised = self._deferred = False
        self._received: set[int] = set()
        self.kind: type[KeyboardInterrupt] = KeyboardInterrupt
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupts:
        if self._in_main_thread:
            self._previous = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._previous)
        if not isinstance(error, self.kind):  # Ray raises a KeyboardInterrupt of its own in place of a handler's
            self.check(error)

    def check(self, error: BaseException | None = None) -> None:
        """Raises the KeyboardInterrupt that was dropped, or that became `error`."""
        if self._raised:
            raise self.kind() from error

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes the first Ctrl-C or SIGTERM a request to stop; a second one raises KeyboardInterrupt."""
        self.check()
        self._deferred = True
        try:
            with self.taking_sigterm():
                yield
        finally:
            self._deferred = False

    @contextlib.contextmanager
    def taking_sigterm(self) -> Iterator[None]:
        """Handles SIGTERM as Ctrl-C, which lets the block clean up, unless your program has a handler for it."""
        before = signal.getsignal(signal.SIGTERM)
        is_taken = self._in_main_thread and (before == signal.SIG_DFL or _is_of_ray(before))
        if is_taken:
            signal.signal(signal.SIGTERM, self._pressed)
        try:
            yield
        finally:
            if is_taken and signal.getsignal(signal.SIGTERM) == self._pressed:
                signal.signal(signal.SIGTERM, before)

    def _pressed(self, signum: int, frame: types.FrameType | None) -> None:
        kind = Terminated if signum == signal.SIGTERM else KeyboardInterrupt
        if not self._deferred or signum in self._received:
            self._raised, self.kind = True, kind
            raise kind
        self._received.add(signum)
        if not self.requested:
            self.requested, self.kind = True, kind
            came, again = ("SIGTERM: ", "another SIGTERM") if kind is Terminated else ("", "Ctrl-C again")
            with contextlib.suppress(RuntimeError, OSError):  # it came within a print, or the terminal is closed
                print(f"\n{came}finishing the current iteration; {again} stops at once", file=sys.stderr)


def _is_of_ray(handler: object) -> bool:
    """Whether Ray has set a handler, which ends the process at once."""
    return str(getattr(handler, "__module__", "")).startswith("ray.")
