"""The environment variables of a node's processes, which Ray replaces in those that it starts."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["restore_variables", "started_with"]


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
