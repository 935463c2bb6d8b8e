"""What several modules of tests ask of a RayVecEnv."""

from __future__ import annotations

from rayvec.vector import RayVecEnv

TOPOLOGIES = {"1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 1), "1x3": (1, 3)}
"""Nodes and workers on each."""
DEADLINE_S = 20.0


def pids_of(env: RayVecEnv) -> list[list[int]]:
    """Process ids of each node: its actor's first, then its workers'."""
    return list(env._pool.worker_pids().values())


def assert_explained(error: BaseException) -> None:
    for word in ("Expected:", "Got:", "Remedy:"):
        assert word in str(error), str(error)
