"""What the processes of a node have in common with those of the driver, and what they have from their node."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rayvec.errors import ConfigError

_PARTS = {"rayvec": 9, "ray": 9, "python": 2, "numpy": 1}
"""How many parts of a version must be equal, since the driver and every node exchange pickles and frames."""


def own_versions() -> dict[str, str]:
    """Returns the versions of this process."""
    rayvec: str = sys.modules["rayvec"].__version__
    return {"python": platform.python_version(), "rayvec": rayvec, "numpy": np.__version__}


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
            f"Node {node} has {', '.join(f'{name} {theirs[name]}' for name in wrong)}, but the driver has "
            f"{', '.join(f'{name} {ours[name]}' for name in wrong)}. Install the same versions on all nodes; rayvec "
            "doctor --address lists them."
        )


def started_with() -> dict[str, str]:
    """Returns the environment variables with which this process was started."""
    lines = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def restore_variables(*names: str) -> None:
    """Gives this process's variables the values with which Ray has started it, which are those of the node.

    Ray sets ``OMP_NUM_THREADS`` to the cores that an actor claims, and hides the GPUs of one that claims none, where
    its version or ``RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO`` says so.
    """
    of_the_node = started_with()
    for name in names:
        os.environ.pop(name, None)
        if name in of_the_node:
            os.environ[name] = of_the_node[name]
