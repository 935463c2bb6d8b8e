"""Dataclass fields with bounds and docstrings: checking values, and describing the fields.

The docstring of a field is the string literal below it; a subclass that changes a default need not repeat it. Bounds
are in the type of a field, by `Annotated`. `check` enforces types and bounds, and `describe` yields all three for
documents.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
import threading
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from rayvec.errors import ConfigError

__all__ = ["OTHER_NAMES", "Bounds", "FieldDoc", "check", "check_names", "describe", "field_names", "plain", "suggested"]

OTHER_NAMES = {
    "lr": ("learning_rate", "policy_lr"),
    "learning_rate": ("policy_lr",),
    "clip_range": ("clip_coef",),
    "clip_param": ("clip_coef",),
    "vf_coef": ("value_coef",),
    "buffer_size": ("replay_size",),
    "net_arch": ("hidden_sizes",),
}
"""Settings that have another name in other libraries, where it is not a near one."""

_IN_PYTHON = {
    "env_id": "Pass a class or function that makes the environment to rayvec.train(config, env=...)",
    "env_kwargs": "Pass a function that makes the environment with such values to rayvec.train(config, env=...)",
    "network": "Pass a function itself to rayvec.train(config, network=...)",
    "wrappers": "Pass a function that makes and wraps the environment to rayvec.train(config, env=...)",
}
"""What to do with values that a file can't hold."""

_LEAST_LIKENESS = 0.8
"""The least similarity (difflib's ratio) of an unknown name to the one that is suggested for it."""

_parsing = threading.Lock()  # Python 3.11 can't parse in two threads: "AST constructor recursion depth mismatch"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The interval of allowed numbers, which are finite; it includes `low` unless `excludes_low` is set."""

    low: float
    high: float = math.inf
    excludes_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            (self.low < value if self.excludes_low else self.low <= value)
            and value <= self.high
            and math.isfinite(value)
        )

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "finite" if self.high == math.inf else f"at most {self.high}"
        if self.high < math.inf:
            return f"{'above' if self.excludes_low else 'from'} {self.low} to {self.high}"
        return f"{'above' if self.excludes_low else 'at least'} {self.low}"


class FieldDoc(NamedTuple):
    """One row of the table of settings: name, type, bounds ("" without bounds), default, docstring."""

    name: str
    type: str
    bounds: str
    default: str
    doc: str


def describe(cls: type) -> Iterator[FieldDoc]:
    """Yields a description of each field of the dataclass `cls`, in the order of declaration.

    >>> from rayvec import PPOConfig
    >>> next(describe(PPOConfig))[:4]
    ('env_id', 'str', '', 'CartPole-v1')
    """
    docs = {name: doc for base in reversed(cls.__mro__[:-1]) for name, doc in _docs(base).items()}
    hints = _hints(cls)
    for item in dataclasses.fields(cls):
        default = item.default_factory() if callable(item.default_factory) else item.default
        bounds = ", ".join(str(bound) for bound in _bounds(hints[item.name]))
        yield FieldDoc(item.name, _type_name(hints[item.name]), bounds, _shown(default), docs.get(item.name, ""))


@functools.cache
def _docs(cls: type) -> dict[str, str]:
    """Returns the docstrings of the annotated assignments in the body of `cls`; none without its source."""
    try:
        with _parsing:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):  # defined at a prompt
        return {}
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in pairwise(body.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def field_names(cls: type) -> list[str]:
    """Returns the names of the fields of the dataclass `cls`, in the order of declaration."""
    return [item.name for item in dataclasses.fields(cls)]


def suggested(name: str, known: Collection[str]) -> str | None:
    """Returns which of the `known` settings a misspelt name stands for, or one of another library; None if none.

    >>> suggested("lr", ["learning_rate"]), suggested("total_step", ["total_steps"]), suggested("wings", ["seed"])
    ('learning_rate', 'total_steps', None)
    >>> suggested("epochs", ["num_epochs", "num_envs"])
    'num_epochs'
    """
    if name in OTHER_NAMES:
        return next((each for each in OTHER_NAMES[name] if each in known), None)
    longer = [each for each in known if each.endswith(f"_{name}")]
    near = longer if len(longer) == 1 else difflib.get_close_matches(name, known, 1, _LEAST_LIKENESS)
    return next(iter(near), None)


def check_names(cls: type, names: Collection[object]) -> None:
    """Checks that each of the names is that of an argument of the dataclass `cls`.

    Raises:
        ConfigError: One is not.
    """
    arguments = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in arguments.values()):  # a constructor of its own
        return
    known = list(arguments)[1:]
    unknown = sorted(str(name) for name in names if name not in known)
    if unknown:
        near = [f"{each} for {name}" if unknown[1:] else each for name in unknown if (each := suggested(name, known))]
        raise ConfigError(
            f"{cls.__name__} has no setting {', '.join(unknown)}. "
            + (f"Did you mean {' and '.join(near)}?" if near else f"Its settings are {', '.join(known)}.")
        )


def plain(instance: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance by name, as strings, numbers, lists and dicts."""
    return {name: _plain(getattr(instance, name)) for name in field_names(type(instance))}


def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in field_names(cls)}


def _bounds(hint: Any) -> Iterator[Bounds]:
    if get_origin(hint) is Annotated:
        yield from (extra for extra in get_args(hint)[1:] if isinstance(extra, Bounds))
    for part in get_args(hint):
        yield from _bounds(part)


def _type_name(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type_name(parts[0])
    if origin in (Union, types.UnionType):
        return " | ".join(_type_name(part) for part in parts)
    if origin is Literal:
        return " | ".join(map(repr, parts))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type_name(part) for part in parts)}]"
    return {type(None): "None", Ellipsis: "..."}.get(hint) or str(hint.__name__)


def _shown(default: object) -> str:
    return "unset" if default is None else str(default)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return str(value) if isinstance(value, Path | str) else value  # a str may be a Reference


def check(instance: Any) -> None:
    """Checks the type and bounds of each field of a dataclass instance; call it in ``__post_init__``.

    Equivalent values are converted: a list to a tuple, a string to a path, an integer to a float, and NumPy's numbers
    and bools to Python's.

    Raises:
        ConfigError: A value has the wrong type or is outside its bounds.
    """
    for name, hint in _hints(type(instance)).items():
        value = getattr(instance, name)
        try:
            object.__setattr__(instance, name, _coerced(value, hint))
        except (TypeError, ValueError):
            raise _refusal(type(instance), name, value) from None


def _holds_objects(value: object) -> bool:
    """Whether a value is, or has within, what a file of settings can't hold."""
    if isinstance(value, dict):
        return any(isinstance(each, dict) or _holds_objects(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(map(_holds_objects, value))
    return not (value is None or isinstance(value, str | int | float))


def _refusal(cls: type, name: str, value: object) -> ConfigError:
    row = next(row for row in describe(cls) if row.name == name)
    advice = _IN_PYTHON[name] if name in _IN_PYTHON and _holds_objects(value) else f"The default is {row.default}"
    return ConfigError(
        f"{name} is {value!r}. It must be {f'{row.type}, {row.bounds}' if row.bounds else row.type}. {advice}."
    )


def _coerced(value: Any, hint: Any) -> Any:
    """Returns `value` as type `hint`; raises TypeError or ValueError if it can't be converted."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        value = _coerced(value, parts[0])
        if any(value not in bound for bound in _bounds(hint)):
            raise ValueError(value)
        return value
    if origin in (Union, types.UnionType):
        return _first_match(value, parts)
    if origin is Literal:
        is_bool = isinstance(value, bool | np.bool_)  # True == 1
        choices = [part for part in parts if isinstance(part, bool) == is_bool]
        return choices[choices.index(value)]
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_coerced(item, parts[0]) for item in value)
    if origin is list and isinstance(value, list | tuple):
        return [_coerced(item, parts[0]) for item in value]
    if origin is dict and isinstance(value, dict):
        return {_coerced(key, parts[0]): _coerced(item, parts[1]) for key, item in value.items()}
    if hint in (int, float):
        return _number(value, hint)
    if hint is bool and isinstance(value, np.bool_):
        return bool(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    raise TypeError(value)


def _number(value: Any, hint: type) -> int | float:
    if not isinstance(value, bool):
        if hint is int and isinstance(value, Integral):
            return int(value)
        if hint is float and isinstance(value, Real):
            return float(value)
    raise TypeError(value)


def _first_match(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        try:
            return _coerced(value, hint)
        except (TypeError, ValueError):
            continue
    raise TypeError(value)
