"""The exceptions that rayvec raises.

    RayvecError
    ├── ConfigError          a setting, or a combination of settings, can't work
    ├── EnvError             an environment raised, hung, or returned a value outside its spaces
    ├── WorkerLostError      a worker process died
    ├── NodeLostError        a node was lost, or the actor on it died
    ├── LearnerError         an update failed, or a rank was lost
    │   └── RankLostError    a rank of a learner died, or did not respond in time
    └── CheckpointError      a checkpoint is missing, truncated or of another kind

Wrong use of a vector environment raises Gymnasium's own errors (`ClosedEnvironmentError`,
`AlreadyPendingCallError`, `NoAsyncCallError`, and `TimeoutError`), which its users catch. An exception that
an environment raises is raised again with its own type and message; its ``__cause__`` is an
:class:`EnvError` that says where it happened.

A message says what happened, then what was expected, then what to do.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import cloudpickle

__all__ = [
    "LIMITS_REMEDY",
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
    "check_flag",
    "check_names",
    "check_node_range",
    "counted",
    "duration",
    "first_line",
    "require",
]


LIMITS_REMEDY = (
    "Raise the limit of processes and threads (ulimit -u, or the container's) or of open files (ulimit -n), free "
    "memory, or pass fewer workers or ranks."
)
"""What to do when the system refuses another process or thread."""


class RayvecError(Exception):
    """The base class of the exceptions of rayvec.

    Attributes:
        raised_in: The origin of an error of another process: node, worker, environment index, seed.
    """

    raised_in: str | None = None
    _failure: RemoteFailure | None = None


class ConfigError(RayvecError, ValueError):
    """A setting, or a combination of settings, can't work."""


class EnvError(RayvecError, RuntimeError):
    """An environment raised, hung, or returned a value outside its spaces."""


class WorkerLostError(RayvecError, RuntimeError):
    """A worker process died."""


class NodeLostError(RayvecError, RuntimeError):
    """A node was lost, or the actor that held its environments died."""


class LearnerError(RayvecError, RuntimeError):
    """An update failed, or a rank of a learner group was lost."""


class RankLostError(LearnerError):
    """A rank of a learner died, or did not respond in time."""


class CheckpointError(RayvecError, RuntimeError):
    """A checkpoint is missing, truncated, or of another kind."""


def require(holds: object, otherwise: str) -> None:
    """Raises a `ConfigError` with the text `otherwise` unless the condition holds."""
    if not holds:
        raise ConfigError(otherwise)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Returns `value`, which must be a whole number of at least `least`.

    Raises:
        ConfigError: It is not.

    >>> check_count("num_envs", 8)
    8
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} is {value!r}. It must be a whole number of at least {least}.")
    return int(value)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Checks that a value is one of `choices`.

    Raises:
        ConfigError: It is not.
    """
    if value not in choices or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}. It must be {' or '.join(map(repr, choices))}.")


def check_flag(name: str, value: Any) -> bool:
    """Returns `value`, which must be True or False.

    Raises:
        ConfigError: It is not.

    >>> check_flag("copy", False)
    False
    """
    if value not in (True, False):
        raise ConfigError(f"{name} is {repr(value)[:200]}. It must be True or False.")
    return bool(value)


def check_names(name: str, value: Any) -> tuple[str, ...]:
    """Returns `value`, which must be a list or tuple of texts.

    Raises:
        ConfigError: It is not, with the argument's name in the message.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{name} is {value!r}. It must be a list of names.")
    return tuple(value)


def check_node_range(value: Any) -> tuple[int, int]:
    """Returns `value`, which must be the least and the greatest number of nodes to use.

    Raises:
        ConfigError: It is not.

    >>> check_node_range([1, 4])
    (1, 4)
    """
    counts = tuple(value) if isinstance(value, tuple | list) else ()
    are_whole = all(isinstance(each, Integral) and not isinstance(each, bool) for each in counts)
    if len(counts) != 2 or not are_whole or not 1 <= counts[0] <= counts[1]:
        raise ConfigError(
            f"num_nodes is {value!r}. It must be a number, or (min, max) with whole numbers 1 <= min <= max."
        )
    return int(counts[0]), int(counts[1])


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An exception that one process sends to another.

    Attributes:
        type_name: Qualified name of the exception's type.
        text: ``str()`` of the exception.
        pickled: The exception by cloudpickle, or None if it can't be pickled and rebuilt.
        remote_traceback: The formatted traceback of the process that raised it.
        where: Its origin, for a person: node, worker, environment index, seed.
        original: The exception itself, in the process that raised it. It is not sent to another process.
    """

    type_name: str
    text: str
    pickled: bytes | None
    remote_traceback: str
    where: str
    original: BaseException | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFailure, (self.type_name, self.text, self.pickled, self.remote_traceback, self.where)

    @classmethod
    def capture(cls, error: BaseException, where: str) -> RemoteFailure:
        """Describes `error`, which is being handled, for another process.

        If it came from another process itself, the description keeps its first origin and traceback.
        """
        origin = error if error.__cause__ is None else error.__cause__
        known: RemoteFailure | None = getattr(origin, "_failure", None)
        if known is not None and origin is error:  # it could not be rebuilt here
            return known
        try:
            text = str(error)
        except Exception as unprintable:  # the exception's own __str__ raised
            text = f"its text can't be read: {unprintable!r}"
        return cls(
            type_name=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
            text=text,
            pickled=_pickled(error, text),
            remote_traceback=known.remote_traceback if known else "".join(traceback.format_exception(error)),
            where=known.where if known else where,
            original=error,
        )

    def rebuild(self, cause_type: type[RayvecError] = EnvError) -> BaseException:
        """Returns the original exception, with a ``__cause__`` of `cause_type` that says where it was raised.

        If the original can't be rebuilt, it returns that cause.
        """
        error = self.original
        if error is None and self.pickled is not None:
            with contextlib.suppress(Exception):  # only the other process knows its class
                error = _unpickled(self.pickled)
        if error is None:
            return self.cause(cause_type)
        error.__cause__ = self.cause(cause_type)
        return error

    def cause(self, cause_type: type[RayvecError] = EnvError) -> RayvecError:
        """Returns an error of `cause_type` that says where, with the remote traceback."""
        cause = cause_type(f"{self.type_name}: {self.text}\n  raised in {self.where}\n\n{self.remote_traceback}")
        cause.raised_in, cause._failure = self.where, replace(self, original=None)
        return cause


def _pickled(error: BaseException, text: str) -> bytes | None:
    """Returns an exception by cloudpickle, or None if it can't be pickled and rebuilt.

    Exceptions pickle as a call of their type with `args`. Where the constructor takes other arguments, that call fails
    or changes the text; then the parts are pickled.
    """
    for attempt in (error, (type(error), error.args, vars(error))):
        with contextlib.suppress(Exception):
            pickled: bytes = cloudpickle.dumps(attempt)
            rebuilt = _unpickled(pickled)
            if type(rebuilt).__qualname__ == type(error).__qualname__ and str(rebuilt) == text:
                return pickled
    return None


def _unpickled(pickled: bytes) -> BaseException:
    """Rebuilds an exception, from its parts without a call of its constructor."""
    value = pickle.loads(pickled)
    if isinstance(value, BaseException):
        return value
    kind, args, attributes = value
    error: BaseException = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def counted(count: int, noun: str) -> str:
    """Returns a number and its noun.

    >>> counted(1, "rank"), counted(20_000, "step")
    ('1 rank', '20,000 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Returns a duration with three digits, or whole seconds, and its unit.

    >>> duration(4321.0), duration(2.0), duration(0.0123), duration(4.56e-05), duration(0.0009996)
    ('4,321 s', '2 s', '12.3 ms', '45.6 µs', '1 ms')
    """
    size, unit = (1.0, "s") if seconds >= 0.9995 else (1e-3, "ms") if seconds >= 0.9995e-3 else (1e-6, "µs")
    return f"{seconds:,.0f} s" if seconds >= 999.5 else f"{seconds / size:.3g} {unit}"


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's text, or 'no reason given' if the text is empty.

    >>> first_line(ValueError("one\ntwo")), first_line(ValueError())
    ('one', 'no reason given')
    """
    return next(iter(str(error).strip().splitlines()), "no reason given")
