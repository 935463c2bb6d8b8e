"""Versions that the driver and every node must share, since they exchange pickles and frames."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

import numpy as np

from rayvec.errors import ConfigError

__all__ = ["check_versions", "is_incompatible", "own_versions"]

_PARTS = {"rayvec": 9, "ray": 9, "python": 2, "numpy": 1}
"""How many parts of a version must be equal."""


def own_versions() -> dict[str, str]:
    """Returns the versions of this process."""
    return {
        "python": platform.python_version(),
        "rayvec": sys.modules["rayvec"].__version__,
        "numpy": np.__version__,
    }


def is_incompatible(package: str, ours: str, theirs: str) -> bool:
    """Says whether two versions of a package can't work together.

    >>> is_incompatible("python", "3.11.7", "3.11.9"), is_incompatible("numpy", "2.4.6", "1.26.4")
    (False, True)
    """
    parts = _PARTS.get(package, 0)
    return ours.split(".")[:parts] != theirs.split(".")[:parts]


def check_versions(theirs: Mapping[str, str], node: str) -> None:
    """Checks the versions of a node.

    Raises:
        ConfigError: One of them can't work together with that of this process.
    """
    ours = own_versions()
    wrong = [name for name in ours if is_incompatible(name, ours[name], theirs[name])]
    if wrong:
        raise ConfigError(
            "Every node has the versions of the driver.",
            expected=", ".join(f"{name} {ours[name]}" for name in wrong),
            got=", ".join(f"{name} {theirs[name]}" for name in wrong) + f" on node {node}",
            remedy="Install the same versions on all nodes; rayvec doctor --address lists them.",
        )
