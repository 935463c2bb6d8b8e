"""The environment variables of a node's processes, which Ray replaces in those that it starts."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["restore_variables"]


def restore_variables(*names: str) -> None:
    """Gives this process's variables the values with which Ray has started it, which are those of the node.

    Ray sets ``OMP_NUM_THREADS`` to the cores that an actor claims, and hides the GPUs of one that claims none, where
    its version or ``RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO`` says so.
    """
    lines = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    started_with = dict(line.split("=", 1) for line in lines if "=" in line)
    for name in names:
        os.environ.pop(name, None)
        if name in started_with:
            os.environ[name] = started_with[name]
