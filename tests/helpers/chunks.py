"""Chunks that are held against each other, and chunks that are waited for."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import ray

from helpers.waiting import DEADLINE_S
from rayvec.data import Chunk
from rayvec.testing import CountingEnv, assert_identical
from rayvec.vector.ray_vec_env import RayVecEnv


def assert_same_chunk(got: Chunk, expected: Chunk, where: str = "") -> None:
    for field in fields(expected):
        assert_identical(getattr(got, field.name), getattr(expected, field.name), f"{where} {field.name}")


def wait_for_parts(env: RayVecEnv) -> None:
    """Waits until every node has done its part of the chunk under way, and leaves that where it is."""
    refs = [ref for _, of_node in env._pool.acting._flights[0].asked for ref in of_node]
    ray.wait(refs, num_returns=len(refs), timeout=DEADLINE_S, fetch_local=False)


class GatedEnv(CountingEnv):
    """From its fourth step on it waits for a file."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self._gate = gate

    def step(self, action: Any) -> Any:
        if self._total >= 3:
            while not self._gate.exists():
                time.sleep(0.002)
        return super().step(action)
