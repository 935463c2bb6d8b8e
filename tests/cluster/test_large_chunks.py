"""Chunks too large for a pipe, which lie in memory that is used again: nothing is written over before it is read."""

from __future__ import annotations

import os
import signal
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeVec
from gymnasium import spaces
from helpers.chunks import assert_same_chunk, parts_are_done, wait_for_parts
from helpers.exact import SpaceEnv, TablePolicy
from helpers.fleet_kit import stepper_of
from helpers.obedient_envs import GatedEnv
from helpers.vector_kit import pids_of
from helpers.waiting import wait_until

from rayvec.collect.collector import Collector
from rayvec.data import Chunk
from rayvec.rollout.loop import rollout

REPEATS = 3_000


class LargeGatedEnv(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Waits for a file from its fourth step on, sees everything many times over, and says who has made it."""

    def __init__(self, gate: Path) -> None:
        super().__init__(GatedEnv(gate))
        self.observation_space = spaces.Box(-(2**62), 2**62, (4 * REPEATS,), np.int64)
        (gate.parent / f"made-{os.getpid()}").touch()

    def observation(self, observation: Any) -> Any:
        return np.tile(observation, REPEATS)


def serial_chunks(fns: list[Any], num_steps: list[int], seed: int) -> list[Chunk]:
    """What one process makes of the same."""
    chunks: list[Chunk] = []
    pool, ids = stepper_of(fns), np.arange(len(fns))
    pool.reset(ids, [seed + i for i in ids.tolist()])
    pool.recv(ids)
    for t in num_steps:
        first_step = sum(chunk.num_steps for chunk in chunks)
        chunks.append(rollout(pool, TablePolicy(), t, noise_seed=seed, first_step=first_step))
    return chunks


@pytest.mark.parametrize("prefetch", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "prefetch"])
@pytest.mark.parametrize(
    ("nodes", "workers"), [pytest.param(1, 2, marks=pytest.mark.slow, id="shm"), pytest.param(2, 1, id="shm+tcp")]
)
def test_chunks_stay_as_they_were(make_vec: MakeVec, nodes: int, workers: int, prefetch: bool) -> None:
    fns = [partial(SpaceEnv, spaces.Box(0, 255, (40, 40), np.uint8))] * 3
    lengths = [20, 20, 60, 30, 1, 40]
    collector = Collector(make_vec(fns, nodes, workers), TablePolicy(), seed=7, prefetch=prefetch)
    chunks, copies = [], []
    for length in lengths:
        for chunk in collector.collect(n_step=3 * length).chunks:
            chunks.append(chunk)
            copies.append(deepcopy(chunk))
    collector.close()
    expected = serial_chunks(fns, [chunk.num_steps for chunk in chunks], 7)
    for chunk, copy, right in zip(chunks, copies, expected, strict=True):
        assert_same_chunk(copy, right)
        assert_same_chunk(chunk, right)


@pytest.mark.slow
def test_who_takes_the_place_of_a_worker_leaves_the_chunk_before_alone(make_vec: MakeVec, tmp_path: Path) -> None:
    """It lies in the memory of the worker that has been killed since, and nobody has read it yet."""
    gate = tmp_path / "gate"
    env = make_vec([partial(LargeGatedEnv, gate)] * 2, workers=2, on_env_error="restart")
    env.reset(seed=0)
    policy, (_, victim, *_) = env.publish(TablePolicy()), pids_of(env)[0]
    env.rollout_async(policy, 3, 0, 0)
    wait_for_parts(env)
    env.rollout_async(policy, 3, 3, 0)
    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: not parts_are_done(env, 1) and len(list(tmp_path.glob("made-*"))) == 3,
        "a worker takes the place of the one that was killed",
    )
    gate.touch()
    wait_until(lambda: parts_are_done(env, 1), "both chunks are done")
    first, second = env.rollout_wait().chunk, env.rollout_wait().chunk
    assert first is not None and second is not None
    (expected,) = serial_chunks([partial(LargeGatedEnv, gate)] * 2, [3], 0)
    assert_same_chunk(first, expected)
    assert second.restarts.tolist() == [[-1, 0]] and second.valid.all()
