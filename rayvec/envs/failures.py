"""What environments return and raise: checked where it comes in, and described for other processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from rayvec.data.trees import copied
from rayvec.envs.owner_signals import is_left_to_owner
from rayvec.errors import EnvError, RemoteFailure

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


def values_of(method: str, count: int, result: Any) -> Any:
    """Returns the result of a step or reset, of an environment or a vector environment.

    Raises:
        EnvError: It is not a tuple of so many values.
    """
    if isinstance(result, (tuple, list)) and len(result) == count:
        return result
    got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
    expected = "obs, info" if count == 2 else "obs, reward, terminated, truncated, info"
    raise EnvError(
        f"{method}() of an environment has returned {got}. gymnasium.Env returns {expected}. Correct the environment, "
        "or wrap one of the old gym library, for example with shimmy."
    )


def own_info(info: Any) -> dict[Any, Any]:
    """Copies an info: environments may modify it after they return it.

    Raises:
        EnvError: It is no dict.
    """
    if not hasattr(info, "items"):
        raise EnvError(f"The info of a step or reset was {type(info).__name__}. It must be a dict, maybe empty.")
    return {key: copied(value) for key, value in info.items()}
