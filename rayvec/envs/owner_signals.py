"""Signals that a process leaves to the process that owns it, as workers leave Ctrl-C to the driver."""

from __future__ import annotations

import os
import signal

LEFT_TO_OWNER = (signal.SIGINT, signal.SIGTERM)
"""Signals that may reach every process of a job."""


def leave_to_owner() -> None:
    """Makes this process ignore `LEFT_TO_OWNER`: the owner decides. If they are blocked, they are unblocked.

    A handler that does nothing, and not SIG_IGN, which programs that an environment starts would inherit. In native
    code, most calls that the signal interrupts resume; poll, select and sleeps return EINTR.
    """
    for number in LEFT_TO_OWNER:
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_OWNER)


def is_left_to_owner(number: signal.Signals) -> bool:
    """Whether this process ignores a signal in that way."""
    return signal.getsignal(number) is _do_nothing


def restore_in_children() -> None:
    """Gives processes that fork from this one the defaults again: an environment may end its own by signals."""
    os.register_at_fork(after_in_child=_restore)


def _do_nothing(number: int, frame: object) -> None:
    pass


def _restore() -> None:
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if is_left_to_owner(number):
            signal.signal(number, default)
