"""Plugins: modules that register algorithms when they are imported."""

from __future__ import annotations

import importlib
from typing import Any

from rayvec.config.schema import require
from rayvec.errors import ConfigError

__all__ = ["import_plugins"]


def import_plugins(modules: Any) -> None:
    """Imports modules, each of which calls :func:`rayvec.training.runs.register`.

    Raises:
        ConfigError: They are not a list of names, or one of them can't be imported.
    """
    are_names = isinstance(modules, list | tuple) and all(isinstance(module, str) for module in modules)
    require(are_names, f"plugin is {repr(modules)[:200]}. It must be a list of names of modules, such as [mine].")
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"The plugin {module!r} can't be imported ({type(error).__name__}: {error}). Correct the name, or "
                "set PYTHONPATH to the directory of the module."
            ) from error
