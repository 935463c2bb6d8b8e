"""What environments and policies raise when they fail, and how a process describes it to another."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from rayvec.envs.owner_signals import is_left_to_owner
from rayvec.errors import EnvError, RemoteFailure

__all__ = ["FAILURES", "captured", "failures_ignored", "is_ctrl_c"]

FAILURES = BaseException
"""What environments, policies and learners raise when they fail. :func:`captured` lets Ctrl-C pass."""


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an error is Ctrl-C. Where a process leaves Ctrl-C to its owner, a KeyboardInterrupt is a failure."""
    return isinstance(error, KeyboardInterrupt) and not is_left_to_owner(signal.SIGINT)


def captured(error: BaseException, where: str) -> RemoteFailure:
    """Describes a failure.

    A ``SystemExit`` and other exceptions that are no ``Exception`` become an ``EnvError``, because they would end the
    process that gets them.

    Raises:
        KeyboardInterrupt: The error is Ctrl-C, which is no failure, except where a process leaves Ctrl-C to its owner.
        SystemExit: The error is that by which Ray ends an actor, after SIGTERM for example.
    """
    if is_ctrl_c(error) or hasattr(error, "ray_terminate_msg"):
        raise error
    if isinstance(error, Exception):
        return RemoteFailure.capture(error, where)
    failure = EnvError(
        f"An environment or a policy has raised {error!r}, which is not derived from Exception. Raise another, such as "
        "RuntimeError, in place of it or of sys.exit()."
    )
    failure.__cause__ = error
    return RemoteFailure.capture(failure, where)


@contextlib.contextmanager
def failures_ignored() -> Iterator[None]:
    """Ignores what the block raises, except Ctrl-C."""
    try:
        yield
    except FAILURES as error:
        if is_ctrl_c(error):
            raise
