"""Chunks too large for a pipe, which lie in memory that is used again: nothing is written over before it is read."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
from conftest import MakeVec
from gymnasium import spaces
from helpers.chunks import assert_same_chunk
from helpers.exact import SpaceEnv, TablePolicy

from rayvec.collect.collector import Collector
from rayvec.data import Chunk
from rayvec.vector.ray_vec_env import RayVecEnv


def serial_chunks(fns: list[Any], num_steps: list[int], seed: int) -> list[Chunk]:
    """What one process makes of the same."""
    with RayVecEnv(fns, num_nodes=0, workers_per_node=0) as env:
        return [env.rollout(TablePolicy(), n, seed=None if number else seed) for number, n in enumerate(num_steps)]


def test_chunks_stay_as_they_were(make_vec: MakeVec) -> None:
    fns = [partial(SpaceEnv, spaces.Box(0, 255, (40, 40), np.uint8))] * 3
    collector = Collector(make_vec(fns, nodes=2), TablePolicy(), seed=7, prefetch=True)
    chunks, copies = [], []
    for length in (20, 20, 60, 30, 1, 40):
        for chunk in collector.collect(n_step=3 * length).chunks:
            chunks.append(chunk)
            copies.append(deepcopy(chunk))
    collector.close()
    expected = serial_chunks(fns, [chunk.num_steps for chunk in chunks], 7)
    for chunk, copy, right in zip(chunks, copies, expected, strict=True):
        assert_same_chunk(copy, right)
        assert_same_chunk(chunk, right)
