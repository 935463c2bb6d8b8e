"""Speed of the pieces that a step, a chunk and an iteration of training are made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_task import LearnerTask
from tianshou.data import Batch, PrioritizedVectorReplayBuffer, VectorReplayBuffer

from rayvec import RayVecEnv
from rayvec.bench.emulated import EmulatedEnv
from rayvec.bench.ways import RandomActions
from rayvec.data import Chunk, ChunkInfo, ChunkInfos
from rayvec.data.chunk import join_chunks
from rayvec.learners.returns import gae
from rayvec.tianshou.collect.buffers import add_chunk
from rayvec.training import checkpoint

RETURNS = [(128, 8), (128, 128), (2048, 64)]


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} workers")
def envs(request: pytest.FixtureRequest) -> Iterator[RayVecEnv]:
    """Environments that do nothing, one for each worker."""
    with RayVecEnv([EmulatedEnv] * request.param, num_nodes=0, workers_per_node=request.param) as started:
        started.reset(seed=0)
        yield started


def test_wake_up(benchmark: Any, envs: RayVecEnv) -> None:
    benchmark(envs.step, np.zeros(envs.num_envs, np.int64))


def test_chunk(benchmark: Any, envs: RayVecEnv) -> None:
    store = envs.publish(RandomActions([np.zeros(2, np.int64)]))

    def chunk() -> None:
        envs.rollout_async(store, 128, 0, 0)
        envs.rollout_wait()

    benchmark(chunk)


def make_chunk(steps: int, envs: int, shape: tuple[int, ...], dtype: Any, infos: str = "") -> Chunk:
    """A chunk of random observations, with episodes of about 40 steps, infos of the episodes or of every step."""
    rng = np.random.default_rng(0)
    obs, last_obs = ((255 * rng.random((*lead, *shape))).astype(dtype) for lead in ((steps, envs), (envs,)))
    terminated = rng.random((steps, envs)) < 1 / 40
    ended = np.argwhere(terminated)
    episode = {"episode": {"r": 40.0, "l": 40, "t": 0.5}}
    dense = {"x_position": 0.1, "x_velocity": 0.5, "reward_forward": 0.25, "reward_ctrl": -0.125}
    told: dict[str, tuple[Any, Any]] = {
        "": ((), None),
        "episodes": (ended, episode),
        "steps": (np.ndindex(steps, envs), dense),
    }
    places, info = told[infos]
    return Chunk(
        env_ids=np.arange(envs),
        obs=obs,
        act=rng.integers(0, 2, (steps, envs)),
        rew=np.ones((steps, envs)),
        terminated=terminated,
        truncated=np.zeros((steps, envs), bool),
        valid=np.ones((steps, envs), bool),
        last_obs=last_obs,
        final_index=ended,
        final_obs=obs[-1][ended[:, 1]],
        infos=ChunkInfos.of(ChunkInfo(int(t), int(n), info) for t, n in places),
    )


def add_in_order(buffer: Any, chunk: Chunk) -> None:
    """Adds a chunk as Tianshou's Collector adds the answers of a vector environment."""
    infos = {(item.t, item.n): item.info for item in chunk.infos}
    following, done, ids = chunk.next_obs(), chunk.done, np.arange(chunk.num_envs)
    for t in range(chunk.num_steps):
        buffer.add(
            Batch(
                obs=chunk.obs[t],
                act=chunk.act[t],
                policy=Batch(),
                obs_next=following[t],
                rew=chunk.rew[t],
                terminated=chunk.terminated[t],
                truncated=chunk.truncated[t],
                done=done[t],
                info=np.array([{**infos.get((t, n), {}), "env_id": n} for n in ids], object),
            ),
            buffer_ids=ids,
        )


def test_join_chunks(benchmark: Any) -> None:
    benchmark(join_chunks, [make_chunk(128, 8, (4,), np.float32, "episodes")] * 8)


CHUNKS = {
    "CartPole": (128, 64, (4,), np.float32),
    "CartPole, episode infos": (128, 64, (4,), np.float32, "episodes"),
    "CartPole, prioritized": (128, 64, (4,), np.float32, "episodes"),
    "HalfCheetah, four infos a step": (128, 64, (17,), np.float64, "steps"),
    "images": (32, 16, (4, 84, 84), np.uint8),
}


def add_in_bulk(buffer: Any, chunk: Chunk) -> None:
    add_chunk(buffer, chunk, list(chunk.infos))


@pytest.mark.parametrize("add", [add_in_order, add_in_bulk], ids=["one by one", "bulk"])
@pytest.mark.parametrize("name", CHUNKS)
def test_bulk_insert(benchmark: Any, name: str, add: Any) -> None:
    chunk = make_chunk(*CHUNKS[name])
    size = 2 * chunk.num_steps * chunk.num_envs, chunk.num_envs
    buffer = PrioritizedVectorReplayBuffer(*size, alpha=0.6, beta=0.4) if "prior" in name else VectorReplayBuffer(*size)
    benchmark(add, buffer, chunk)


def values_and_ends(shape: tuple[int, int]) -> tuple[Any, ...]:
    """Rewards, values, next values, terminated and truncated, at random."""
    generator = np.random.default_rng(0)
    return generator.random(shape), *generator.random((2, *shape), np.float32), *(generator.random((2, *shape)) < 0.01)


@pytest.mark.parametrize("shape", RETURNS, ids=str)
def test_gae(benchmark: Any, shape: tuple[int, int]) -> None:
    benchmark(gae, *values_and_ends(shape), gamma=0.99, lam=0.95)


def test_checkpoint(benchmark: Any, tmp_path: Path) -> None:
    learner = LearnerTask("ppo", obs_size=4).learner()
    benchmark(checkpoint.save, tmp_path / "checkpoint.pt", {"learner": learner.state_dict()})
