"""A chunk that is cut has what each worker had taken, and the next one goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from helpers.obedient_envs import Uneven, lean

from rayvec import Collector, RayVecEnv
from rayvec.errors import ConfigError

NUM_ENVS, SEED = 4, 7
ENGINES = {
    "this process": {"workers_per_node": 0},
    "a worker for each": {"workers_per_node": NUM_ENVS},
    "two workers": {"workers_per_node": 2},
}


def makers() -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    return [lambda s=k: Uneven(gymnasium.make("CartPole-v1", max_episode_steps=9), 0.002 * s) for k in range(NUM_ENVS)]


def alone(index: int, num_steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps one environment: the observations that the policy sees, the rewards, and where episodes end."""
    env = makers()[index]()
    obs, _ = env.reset(seed=SEED + index)
    seen, rewards, ends = [], [], []
    for _ in range(num_steps):
        seen.append(obs)
        obs, reward, terminated, truncated, _ = env.step(int(lean(obs[None])[0]))
        rewards.append(reward)
        ends.append(terminated or truncated)
        if ends[-1]:
            obs, _ = env.reset()
    return np.array(seen), np.array(rewards), np.array(ends)


@pytest.mark.parametrize(
    ("inference", "engine"),
    [
        pytest.param(inference, engine, marks=() if inference != "node" and engine == quick else pytest.mark.slow)
        for inference, quick in (("worker", "two workers"), ("driver", "this process"), ("node", ""))
        for engine in ENGINES
    ],
)
def test_each_environment_continues_where_its_chunk_was_cut(engine: str, inference: Any) -> None:
    limits = [3, 17, 1, 29, 1000, 12]
    with RayVecEnv(makers(), num_nodes=0, **ENGINES[engine]) as env:
        collector = Collector(env, lean, inference, seed=SEED)
        batches = [collector.collect(n_step=40, cut=lambda steps, limit=limit: steps >= limit) for limit in limits]
    for batch, limit in zip(batches, limits, strict=True):
        valid = batch.chunks[0].valid
        assert (np.diff(valid.astype(int), axis=0) <= 0).all(), "only the last steps of an environment are missing"
        assert valid[0].all(), "every environment takes a step at least"
        assert min(limit, 40) <= valid.sum() <= 40
        assert batch.stats.n_collected_steps == valid.sum() and batch.stats.n_surplus_steps == 0
    assert batches[4].chunks[0].valid.all(), "this one was not cut"
    assert any(not batch.chunks[0].valid.all() or batch.chunks[0].num_steps < 10 for batch in batches)
    for n in range(NUM_ENVS):
        taken = [(chunk, chunk.valid[:, n]) for chunk in (batch.chunks[0] for batch in batches)]
        names = ("obs", "rew", "done")
        obs, rew, done = (np.concatenate([getattr(chunk, name)[valid, n] for chunk, valid in taken]) for name in names)
        for got, expected in zip((obs, rew, done), alone(n, len(rew)), strict=True):
            np.testing.assert_array_equal(got, expected)
    lens = np.concatenate([batch.stats.lens for batch in batches])
    assert len(lens) == sum(int(batch.chunks[0].done.sum()) for batch in batches)


def test_only_environments_of_one_machine_can_be_cut(ray_cluster: object) -> None:
    with RayVecEnv("CartPole-v1", 2, num_nodes=1, workers_per_node=1) as env:
        with pytest.raises(ConfigError, match="`cut` was passed with environments on Ray"):
            Collector(env, lean).collect(n_step=8, cut=lambda steps: True)
    with pytest.raises(ConfigError, match="first_id=3"):
        RayVecEnv("CartPole-v1", 2, num_nodes=1, first_id=3)
