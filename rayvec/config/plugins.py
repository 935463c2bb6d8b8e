"""Plugins: modules that register algorithms when they are imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from rayvec.errors import ConfigError

__all__ = ["import_plugins"]


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
