"""The exception tree, its messages, and the way of an exception between processes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from helpers.obedient_envs import OwnError

from rayvec import errors
from rayvec.errors import ConfigError, EnvError, RayvecError, RemoteFailure

OURS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


def test_every_error_is_one_of_ours_and_of_what_people_catch() -> None:
    for error in OURS:
        assert issubclass(error, RayvecError)
        assert error.__name__ in (errors.__doc__ or "")
        if error is not RayvecError:
            assert issubclass(error, (ValueError, RuntimeError))
    assert issubclass(ConfigError, ValueError)


class Twice(Exception):
    """Says something else when it is made from its own arguments."""

    def __init__(self, text: str) -> None:
        super().__init__(f"bad {text}")


class KeywordOnly(RuntimeError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a function")
        self.function = (i for i in range(3))


def make_local() -> Exception:
    class Local(ValueError):
        pass

    return Local("no process can import me")


def captured(error: BaseException) -> RemoteFailure:
    """Raises and captures, then sends it through bytes as between processes."""
    try:
        raise error
    except BaseException as raised:
        return pickle.loads(pickle.dumps(RemoteFailure.capture(raised, "node n, worker 2, environment 7, seed 9")))  # type: ignore[no-any-return]


class TestRemoteFailure:
    @pytest.mark.parametrize(
        "error",
        [
            *(ValueError("a", 1), KeyError("k"), OSError(2, "no such file", "name"), StopIteration(3)),
            *(make_local(), ZeroDivisionError()),
            *(OwnError(3, "odd"), Twice("thing"), KeywordOnly(code=3)),  # constructors that take other arguments
        ],
        ids=repr,
    )
    def test_what_can_be_rebuilt_is(self, error: Exception) -> None:
        rebuilt = captured(error).rebuild()
        assert type(rebuilt).__qualname__ == type(error).__qualname__ and vars(rebuilt) == vars(error)
        assert (str(rebuilt), rebuilt.args) == (str(error), error.args)
        self.check_cause(rebuilt.__cause__, error)

    @pytest.mark.parametrize("pickled", [None, b"\x80\x05cno_such_module_anywhere\nError\n.", b"garbage"])
    def test_what_can_not_is_told_in_full(self, pickled: bytes | None) -> None:
        error = Unpicklable() if pickled is None else ValueError("x")
        failure = captured(error)
        self.check_cause((failure if pickled is None else replace(failure, pickled=pickled)).rebuild(), error)

    def check_cause(self, cause: Any, error: Exception) -> None:
        assert type(cause) is EnvError
        for words in (type(error).__qualname__, str(error), "environment 7, seed 9", "Traceback", "raise error"):
            assert words in str(cause)
