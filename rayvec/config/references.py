"""Objects in settings: an environment or a network as a name, which can be written to a file, with its object."""

from __future__ import annotations

import importlib
import operator
from typing import Any

from rayvec.config.schema import require
from rayvec.errors import ConfigError

__all__ = ["Reference", "is_unnamed", "refer", "resolve"]

_UNNAMED = " (passed in Python)"
"""Ends the name of an object that can't be imported by it."""


class Reference(str):
    """The name of an object, "module:name", with the object.

    It is a string wherever settings are compared or written. A pickle of it carries the object.

    Args:
        name: The name.
        target: The object.
    """

    target: Any

    def __new__(cls, name: str, target: Any) -> Reference:
        """Makes a string with an attribute."""
        reference = super().__new__(cls, name)
        reference.target = target
        return reference

    def __reduce__(self) -> tuple[Any, ...]:
        return Reference, (str(self), self.target)


def refer(target: Any) -> Reference:
    """Returns the name of an object with the object; :func:`resolve` returns the object.

    A function or class of an importable module is named "module:name". Any other object (a lambda, a local function,
    a function of a script) gets a name that only describes it. It contains "<" where other objects may have the same.
    """
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", f"<{type(target).__qualname__}>")
    path = f"{module}:{name}"
    if module not in ("__main__", "__mp_main__"):
        try:
            if _imported(path) is target:
                return Reference(path, target)
        except (ImportError, AttributeError, ValueError, TypeError):
            pass
    return Reference(f"{name}{_UNNAMED}", target)


def is_unnamed(name: str) -> bool:
    """Whether `name` only describes an object, so that the object must be passed again."""
    return name.endswith(_UNNAMED)


def resolve(setting: str, name: str) -> Any:
    """Returns the object that a setting names.

    Args:
        setting: The name of the setting, for errors.
        name: Its value: a :class:`Reference`, or "module:name".

    Raises:
        ConfigError: The object can't be imported by this name.
    """
    if isinstance(name, Reference):
        return name.target
    require(
        not is_unnamed(name),
        f"The {setting} of this run, {name!r}, was passed in Python and can't be imported by a name. Pass it "
        f"again, as {setting.removesuffix('_id')}= of rayvec.resume, rayvec.load or evaluate_run. To use the command "
        "line, move it into a module and name it as module:function.",
    )
    try:
        target = _imported(name)
    except (Exception, SystemExit) as error:
        cause = None if isinstance(error, ImportError | AttributeError | ValueError) else error
        raise ConfigError(
            f"{setting} is {str(name)!r}, which can't be imported ({type(error).__name__}: {error}). It must be "
            "module:function or module:Class. Correct the name, or set PYTHONPATH to the directory of the module."
        ) from cause
    require(
        callable(target), f"{setting} is {str(name)!r}, a {type(target).__name__}. It must be a function or a class."
    )
    return target


def _imported(name: str) -> Any:
    """Returns the object that "module:name" names.

    Raises:
        ImportError: There is no such module.
        AttributeError: The module has no such object.
        ValueError: There is no module in the name.
    """
    module, _, path = name.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))
