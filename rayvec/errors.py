"""The exceptions that rayvec raises.

    RayvecError
    ├── ConfigError          a setting, or a combination of settings, that can't work
    ├── EnvError             an environment raised, hung, or returned what its spaces forbid
    ├── WorkerLostError      a worker process ended without being asked to
    ├── NodeLostError        a node, or the actor on it, is gone
    ├── LearnerError         an update failed, or a rank was lost
    │   └── RankLostError    a rank of a learner is gone, or silent for too long
    └── CheckpointError      a checkpoint is missing, truncated or of another kind

Wrong use of a vector environment raises Gymnasium's own errors (`ClosedEnvironmentError`,
`AlreadyPendingCallError`, `NoAsyncCallError`, and `TimeoutError`), because that is what its users
catch. An exception raised inside an environment is raised again with its own type and message; its
``__cause__`` is the :class:`EnvError` that says where it happened.

Every message states the rule, what was expected, what was got, and the remedy.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import cloudpickle

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EnvError",
    "LearnerError",
    "NodeLostError",
    "RankLostError",
    "RayvecError",
    "RemoteFailure",
    "WorkerLostError",
    "check_choice",
    "check_count",
    "message",
]


class RayvecError(Exception):
    """The root of everything that rayvec raises on its own account.

    Args:
        rule: The rule that was broken, or the whole text of the message.
        expected: What the rule asks for. With it, `got` and `remedy` are required.
        got: What was found instead.
        remedy: What to do about it.

    Attributes:
        raised_in: Where it was raised, if that was another process: node, worker, environment index, seed.

    >>> print(ConfigError("num_envs is a count.", expected="at least 1", got=0, remedy="Pass num_envs=1."))
    num_envs is a count. Expected: at least 1. Got: 0. Remedy: Pass num_envs=1.
    """

    raised_in: str | None = None

    def __init__(self, rule: object = "", *, expected: object = None, got: object = None, remedy: str = "") -> None:
        super().__init__(rule if not remedy else message(str(rule), expected=expected, got=got, remedy=remedy))


class ConfigError(RayvecError, ValueError):
    """A setting, or a combination of settings, that can't work."""


class EnvError(RayvecError, RuntimeError):
    """An environment raised, hung, or returned what its spaces forbid."""


class WorkerLostError(RayvecError, RuntimeError):
    """A worker process ended without being asked to."""


class NodeLostError(RayvecError, RuntimeError):
    """A node, or the actor that held its environments, is gone."""


class LearnerError(RayvecError, RuntimeError):
    """An update failed, or a rank of a learner group was lost."""


class RankLostError(LearnerError):
    """A rank of a learner is gone, or did not come to a sum in time."""


class CheckpointError(RayvecError, RuntimeError):
    """A checkpoint is missing, truncated, or of another kind."""


def message(rule: str, *, expected: object, got: object, remedy: str) -> str:
    """Returns the text of an error in the form that all of ours have.

    >>> print(message("num_envs counts environments.", expected="at least 1", got=0, remedy="Pass num_envs=1."))
    num_envs counts environments. Expected: at least 1. Got: 0. Remedy: Pass num_envs=1.
    """
    return f"{rule} Expected: {expected}. Got: {got}. Remedy: {remedy}"


def check_count(name: str, value: Any) -> int:
    """Returns `value`, which must count something: a whole number of at least 1.

    Raises:
        ConfigError: It is none.

    >>> check_count("num_envs", 8)
    8
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(
            f"{name} is a count.",
            expected="a whole number of at least 1",
            got=repr(value),
            remedy=f"Pass {name}=1 or more.",
        )
    return int(value)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuses a value that is not one of `choices`.

    Raises:
        ConfigError: It is none of them.
    """
    if value not in choices or isinstance(value, bool):
        raise ConfigError(
            f"{name} is one of a few.",
            expected=" or ".join(map(repr, choices)),
            got=repr(value),
            remedy=f"Pass {name}={choices[0]!r}, or leave it out.",
        )


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An exception on its way from the process that raised it to the one that must hear of it.

    Attributes:
        type_name: Qualified name of the exception's type.
        text: ``str()`` of the exception.
        pickled: The exception by cloudpickle, or None where it can't be pickled and rebuilt.
        remote_traceback: The formatted traceback of the process that raised it.
        where: Who raised it, for a person: node, worker, environment index, seed.
    """

    type_name: str
    text: str
    pickled: bytes | None
    remote_traceback: str
    where: str

    @classmethod
    def capture(cls, error: BaseException, where: str) -> RemoteFailure:
        """Describes `error`, which is being handled, so that it survives the way to another process.

        Where it has come from another process itself, it still says where it was raised first.
        """
        first = getattr(error if error.__cause__ is None else error.__cause__, "raised_in", None)
        try:
            pickled: bytes | None = cloudpickle.dumps(error)
            rebuilt = pickle.loads(pickled)  # type: ignore[arg-type]
            if type(rebuilt).__qualname__ != type(error).__qualname__ or str(rebuilt) != str(error):
                pickled = None
        except Exception:
            pickled = None
        return cls(
            type_name=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
            text=str(error),
            pickled=pickled,
            remote_traceback="".join(traceback.format_exception(error)),
            where=first or where,
        )

    def rebuild(self, cause_type: type[RayvecError] = EnvError) -> BaseException:
        """Returns the original exception, its ``__cause__`` of `cause_type`, saying where it was raised.

        Where the original can't be rebuilt, that cause itself is returned.
        """
        if self.pickled is None:
            return self.cause(cause_type)
        try:
            error: BaseException = pickle.loads(self.pickled)
        except Exception:  # its class is known to the other process alone
            return self.cause(cause_type)
        error.__cause__ = self.cause(cause_type)
        return error

    def cause(self, cause_type: type[RayvecError] = EnvError) -> RayvecError:
        """Returns an error of `cause_type` that says where, with the remote traceback."""
        cause = cause_type(f"{self.type_name}: {self.text}\n  raised in {self.where}\n\n{self.remote_traceback}")
        cause.raised_in = self.where
        return cause
