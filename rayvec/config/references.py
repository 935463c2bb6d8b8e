"""Objects in settings by names that a file can hold: environments, networks, and modules that add algorithms."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable
from typing import Any

from rayvec.errors import ConfigError, require

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
    name = getattr(target, "__qualname__", f"<{type(target).__qualname__}>")
    module = getattr(target, "__module__", None)
    path = f"{module}:{name}"
    try:
        is_named = module not in ("__main__", "__mp_main__") and _imported(path) is target
    except (ImportError, AttributeError, ValueError, TypeError):
        is_named = False
    return Reference(path if is_named else f"{name}{_UNNAMED}", target)


def is_unnamed(name: str) -> bool:
    """Whether `name` only describes an object, so that the object must be passed again."""
    return name.endswith(_UNNAMED)


def resolve(setting: str, name: str) -> Any:
    """Returns the object that a setting names.

    Args:
        setting: The name of the setting, for errors.
        name: Its value: a :class:`Reference`, or "module:name".

    Raises:
        ConfigError: The object can't be imported by this name, or can't be called.
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
        target, problem = _imported(name), "it is neither a function nor a class"
    except (Exception, SystemExit) as error:
        target, problem = None, f"{type(error).__name__}: {error}"
    require(
        callable(target),
        f"{setting} is {str(name)!r}, which can't be used ({problem}). It must be module:function or module:Class. "
        "Correct the name, or set PYTHONPATH to the directory of the module.",
    )
    return target


def _imported(name: str) -> Any:
    """Returns the object that "module:name" names."""
    module, _, path = name.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))


def import_plugins(modules: Iterable[str]) -> None:
    """Imports modules, each of which calls :func:`rayvec.training.runs.register`.

    Raises:
        ConfigError: One of them can't be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"The plugin {module!r} can't be imported ({type(error).__name__}: {error}). Correct the name, or "
                "set PYTHONPATH to the directory of the module."
            ) from error
