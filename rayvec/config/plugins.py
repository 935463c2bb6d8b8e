"""Plugins: modules that register algorithms when they are imported."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from rayvec.errors import ConfigError

__all__ = ["import_plugins", "split_plugins"]


def import_plugins(modules: Sequence[str]) -> None:
    """Imports modules, each of which calls :func:`rayvec.training.runs.register`.

    Raises:
        ConfigError: They are not a list of names, or one of them can't be imported.
    """
    if not isinstance(modules, list | tuple) or not all(isinstance(module, str) for module in modules):
        raise ConfigError(
            f"plugin is {repr(modules)[:200]}. It must be a list of names of modules, for example plugin: [mine]."
        )
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"The plugin {module!r} can't be imported ({type(error).__name__}: {error}). Correct the name, or "
                "set PYTHONPATH to the directory of the module."
            ) from error


def split_plugins(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the values of ``--plugin``, wherever it stands in a command line, and the other arguments.

    Raises:
        ConfigError: It has no value.

    >>> split_plugins(["train", "--plugin", "mine", "reinforce", "--seed", "3"])
    (['mine'], ['train', 'reinforce', '--seed', '3'])
    """
    plugins: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for arg in rest:
        option, is_joined, module = arg.partition("=")
        if option != "--plugin":
            others.append(arg)
            continue
        if not is_joined:
            module = next(rest, "")
        if not module or module.startswith("-"):
            raise ConfigError(
                f"{f'--plugin {module}'.strip()} names no module. Pass --plugin MODULE, once for each module."
            )
        plugins.append(module)
    return plugins, others
