"""The modules that a process imports before it forks workers."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable

from rayvec.errors import ConfigError

__all__ = ["check_threads", "import_modules"]

_threads: dict[str, str] = {}
"""The threads that modules have started, by module."""


def import_modules(names: Iterable[str]) -> None:
    """Imports modules. Those that can't be imported are reported on standard error."""
    for name in names:
        before = threading.enumerate()
        try:
            importlib.import_module(name)
        except Exception as error:  # workers that need the module raise it
            got = f"{type(error).__name__}: {error}"
            print(f"rayvec: preload can't import {name!r}: {got}. Workers start without it.", file=sys.stderr)
        if started := [each.name for each in threading.enumerate() if each not in before]:
            _threads[name] = ", ".join(started)


def check_threads() -> None:
    """Checks, in a forked process, that no imported module has started a thread, which would be missing here.

    Raises:
        ConfigError: One has.
    """
    for module, threads in _threads.items():
        raise ConfigError(
            f"The module {module!r} starts a thread when it is imported ({threads}). Workers are forked from the "
            "process that preloads it, and threads do not survive that. Remove it from preload."
        )
