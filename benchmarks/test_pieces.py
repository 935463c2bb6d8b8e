"""Speed of the pieces that a step, a chunk and an update are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bulk_insert import add_in_order, episode_info, make_chunk
from gymnasium import spaces
from tianshou.data import VectorReplayBuffer

from rayvec.bench.harness.emulated import EmulatedEnv
from rayvec.bench.harness.learners import LearnerTask
from rayvec.bench.harness.ours import TimedPolicy
from rayvec.cluster.frames import FrameFormat
from rayvec.data import StepBatch
from rayvec.data.chunk_ops import join_chunks
from rayvec.envs.factory import EnvFactory
from rayvec.learners.returns import vtrace
from rayvec.node.process_pool import ProcessPool
from rayvec.pools.base import Autoreset
from rayvec.pools.memory import ArrayLayout
from rayvec.rollout.loop import as_policy
from rayvec.tianshou.collect.buffers import add_chunk

ENVS = 48
SHAPES = [(4,), (84, 84)]


def make_frames(shape: tuple[int, ...]) -> tuple[FrameFormat, StepBatch]:
    """The format of observations of this shape, and the answer of 48 environments."""
    obs = spaces.Box(0, 255, shape, np.uint8 if len(shape) > 1 else np.float32)
    frames = FrameFormat(ArrayLayout.of(obs), ArrayLayout.of(spaces.Discrete(2)))
    flags = np.zeros(ENVS, bool)
    batch = StepBatch(np.arange(ENVS), np.zeros((ENVS, *shape), obs.dtype), np.zeros(ENVS), flags, flags)
    return frames, batch


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_frame_encode(benchmark: Any, shape: tuple[int, ...]) -> None:
    frames, batch = make_frames(shape)
    benchmark(frames.pack_answer, batch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_frame_decode(benchmark: Any, shape: tuple[int, ...]) -> None:
    frames, batch = make_frames(shape)
    frame = bytearray(frames.pack_answer(batch)[0])
    benchmark(frames.unpack_answer, frame)


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} workers")
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    """Environments that do nothing, one for each worker."""
    started = ProcessPool.start(EnvFactory.build([EmulatedEnv] * request.param), request.param)
    ids = np.arange(request.param)
    started.reset(ids, [0] * request.param)
    started.recv(ids)
    yield started
    started.close()


def test_wake_up(benchmark: Any, pool: ProcessPool) -> None:
    ids = np.arange(pool.num_envs)
    actions = np.zeros(pool.num_envs, np.int64)

    def step() -> None:
        pool.send(ids, actions, Autoreset.NEXT_STEP)
        pool.recv(ids)

    benchmark(step)


def test_chunk(benchmark: Any, pool: ProcessPool) -> None:
    import cloudpickle

    pool.acting.load(1, cloudpickle.dumps(as_policy(TimedPolicy([np.zeros(2, np.int64)]))))

    def take() -> None:
        pool.begin_rollout(1, 128, 0, 0)
        pool.finish_rollout()

    benchmark(take)


def test_join_chunks(benchmark: Any) -> None:
    chunk = make_chunk(128, 8, (4,), np.float32, episode_info)
    benchmark(join_chunks, [chunk] * 8)


@pytest.mark.parametrize("add", [add_in_order, add_chunk], ids=["one by one", "bulk"])
def test_bulk_insert(benchmark: Any, add: Any) -> None:
    chunk = make_chunk(128, 8, (4,), np.float32, episode_info)
    benchmark(add, VectorReplayBuffer(4096, 8), chunk)


@pytest.mark.parametrize("shape", [(128, 8), (128, 128), (2048, 64)], ids=str)
def test_vtrace(benchmark: Any, shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    value, next_value, ratio = generator.random((3, *shape), np.float32)
    terminated, truncated = generator.random((2, *shape)) < 0.01
    arrays = generator.random(shape), value, next_value, np.log(0.5 + ratio), terminated, truncated
    benchmark(vtrace, *arrays, gamma=0.99)


@pytest.mark.parametrize("algorithm", ["sac", "impala"])
def test_update(benchmark: Any, algorithm: str) -> None:
    import torch

    torch.set_num_threads(1)
    task = LearnerTask(algorithm, num_envs=16, minibatch_size=256)
    learner = task.learner()()
    batch = task.batch(learner)
    learner.update(batch)
    benchmark.pedantic(learner.update, (batch,), rounds=5)
