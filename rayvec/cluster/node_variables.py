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
    started_with = dict(
        each.split("=", 1) for each in Path("/proc/self/environ").read_text().split("\0") if "=" in each
    )
    for name in names:
        os.environ.pop(name, None)
        if name in started_with:
            os.environ[name] = started_with[name]
