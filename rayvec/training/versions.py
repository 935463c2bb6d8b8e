"""The versions that results depend on."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from contextlib import suppress

__all__ = ["installed_versions"]

_PACKAGES = ("ray", "gymnasium", "tianshou", "torch", "numpy")


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, rayvec, and the packages that results depend on, where they are installed."""
    found = {"python": platform.python_version(), "rayvec": sys.modules["rayvec"].__version__}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
