"""Chunks that are held against each other, and chunks that are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from helpers.testing import assert_identical
from helpers.waiting import DEADLINE_S
from rayvec.data import Chunk
from rayvec.vector.ray_vec_env import RayVecEnv


def assert_same_chunk(got: Chunk, expected: Chunk, where: str = "") -> None:
    """Asserts that two chunks are equal. The order of the keys of an info does not count."""
    for field in fields(expected):
        got_value, value = (_in_key_order(getattr(chunk, field.name)) for chunk in (got, expected))
        assert_identical(got_value, value, f"{where} {field.name}")


def _in_key_order(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_in_key_order, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [*map(_in_key_order, value)]
    return dict(sorted(value.items(), key=str)) if isinstance(value, dict) else value


def wait_for_parts(env: RayVecEnv, timeout_s: float = DEADLINE_S, chunk: int = 0) -> None:
    """Waits until every node has done its part of a pending chunk, and leaves the chunk pending.

    Workers of the driver's own node that have ended meanwhile are restarted.
    """
    if not env._envs.wait([*env._posted.values()][chunk], timeout_s):
        raise TimeoutError("a node has not done its part")
