"""The versions that results depend on."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

__all__ = ["installed_versions"]


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, rayvec, and the packages that results depend on."""
    found = {name: importlib.metadata.version(name) for name in ("ray", "gymnasium", "tianshou", "torch", "numpy")}
    return {"python": platform.python_version(), "rayvec": sys.modules["rayvec"].__version__, **found}
