"""Chunks that are held against each other, and chunks that are waited for."""

from __future__ import annotations

import inspect
import time
from dataclasses import fields

import ray

from helpers.testing import assert_identical
from helpers.waiting import DEADLINE_S
from rayvec.data import Chunk
from rayvec.pools.base import NotReady
from rayvec.vector.ray_vec_env import RayVecEnv


def assert_same_chunk(got: Chunk, expected: Chunk, where: str = "") -> None:
    for field in fields(expected):
        assert_identical(getattr(got, field.name), getattr(expected, field.name), f"{where} {field.name}")


def wait_for_parts(env: RayVecEnv, timeout_s: float = DEADLINE_S, chunk: int = 0) -> None:
    """Waits until every node has done its part of a pending chunk, and leaves the part where it is.

    Workers of the driver's own node that have ended meanwhile are restarted.
    """
    for node, wait in env._envs.pool.acting._pending[chunk].requested.values():
        if node.transport == "tcp":
            refs = list(inspect.getclosurevars(wait).nonlocals["refs"])
            if len(ray.wait(refs, num_returns=len(refs), timeout=timeout_s, fetch_local=False)[0]) < len(refs):
                raise NotReady("a node has not done its part")
        else:
            pool = node._pool
            pool._supervisor.wait_all(pool.acting._pending[chunk].commands, time.monotonic() + timeout_s)


def parts_are_done(env: RayVecEnv, chunk: int = 0) -> bool:
    """Whether :func:`wait_for_parts` would not wait."""
    try:
        wait_for_parts(env, 0.0, chunk)
    except NotReady:
        return False
    return True
