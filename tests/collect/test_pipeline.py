"""The parts that both collectors share: chunks started ahead, and episodes assigned beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.exact import TablePolicy
from helpers.examples import examples
from helpers.testing import CountingEnv, counting_errors
from hypothesis import given, strategies as st

from rayvec.collect.asynchronous import PartChunk, PartsPipeline
from rayvec.collect.episode_quotas import EpisodeQuotas
from rayvec.collect.pipeline import ChunkPipeline
from rayvec.tianshou.collect.schedules import TianshouEpisodes
from rayvec.vector.ray_vec_env import RayVecEnv


def by_definition(n_episode: int, ended: np.ndarray, quotas: bool) -> np.ndarray:
    """Walks through steps one after another; returns which belong, ``bool [T, N]``."""
    n = ended.shape[1]
    left = [n_episode // n + (i < n_episode % n) for i in range(n)]
    total, takes_part = n_episode, [i < n_episode for i in range(n)]
    belongs = np.zeros_like(ended)
    for t, row in enumerate(ended):
        belongs[t] = [left[i] > 0 if quotas else takes_part[i] for i in range(n)]
        over = [i for i in range(n) if row[i] and belongs[t, i]]
        total -= len(over)
        for i in over:
            left[i] -= 1
            if sum(takes_part) > total:
                takes_part[i] = False
    return belongs


@examples(200)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 12), st.sampled_from([EpisodeQuotas, TianshouEpisodes]))
def test_episodes_are_those_that_a_walk_through_the_steps_finds(
    seed: int, num_envs: int, n_episode: int, kind: Any
) -> None:
    schedule, chunks, rng = kind(n_episode, num_envs), [], np.random.default_rng(seed)
    taken = []
    while schedule.next_steps():
        chunks.append(rng.random((7, num_envs)) < 0.2)
        taken.append(schedule.take(np.ones((7, num_envs), bool), chunks[-1]))
    ended, belongs = np.concatenate(chunks), np.concatenate(taken)
    np.testing.assert_array_equal(belongs, by_definition(n_episode, ended, kind is EpisodeQuotas))
    assert (ended & belongs).sum() == n_episode
    assert not schedule.take(np.ones((7, num_envs), bool), ended[:7]).any()


def test_steps_are_numbered_through_also_after_an_interrupted_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    env = RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=0)
    store = env.publish(TablePolicy())
    pipeline = ChunkPipeline(env, noise_seed=1)
    pipeline.start(store, 3)
    pipeline.start(store, 4)
    assert (pipeline.first_step, pipeline.pending_steps, len(pipeline.pending)) == (0, 7, 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(env, "rollout_wait", lambda cut: (_ for _ in ()).throw(KeyboardInterrupt()))
        pipeline.finish()
    assert (pipeline.first_step, pipeline.pending_steps) == (0, 7)
    chunks: list[Any] = [pipeline.finish().chunk]
    pipeline.start(store, 5)
    while pipeline.pending:
        chunks.append(pipeline.finish().chunk)
    assert [chunk.first_step for chunk in chunks] == [0, 3, 7]
    assert (pipeline.first_step, pipeline.pending_steps) == (12, 0)
    assert counting_errors(chunks) == []


def test_an_interrupt_before_the_next_chunk_of_a_part_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=2) as env:
        store, parts = env.publish(TablePolicy()), PartsPipeline(env, noise_seed=1, max_staleness=2)
        kept: list[PartChunk] = []
        env.reset(seed=0)
        parts.start(store, 3, ahead=False)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(env, "rollout_async", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt()))
            parts.collect(store, 3, kept, ahead=True)
        assert sorted(len(each.pending) for each in parts.pipelines) == [0, 1]
        assert len(kept) == 1  # the chunk that had finished is not lost
        for pipeline in parts.pipelines:
            if pipeline.pending:
                pipeline.finish()
        assert not parts.pending
