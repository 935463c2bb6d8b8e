"""What several modules of tests ask of a RayVecEnv."""

from __future__ import annotations

import os
import re

from rayvec.vector.ray_vec_env import RayVecEnv

TOPOLOGIES = {"1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 1), "1x3": (1, 3), "no Ray": (0, 2), "none": (0, 0)}
"""Nodes and workers on each; on none, this process steps the environments."""


def pids_of(env: RayVecEnv) -> list[list[int]]:
    """Process ids of each node: its actor's (in place of this process: its first worker's), then its workers'."""
    return [[workers[0] if owner == os.getpid() else owner, *workers] for owner, *workers in env.worker_pids().values()]


def assert_explained(error: BaseException) -> None:
    """Asserts that the error says in a sentence what happened, and in another what to do."""
    assert re.search(r"\. [A-Z]", str(error)), str(error)
