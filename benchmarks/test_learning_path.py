"""Speed of what a training iteration is made of, apart from the environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rayvec import Policy, PPOConfig
from rayvec.data import Batch, CollectStats
from rayvec.envs.factory import EnvFactory
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.returns import gae
from rayvec.pools.serial import SerialPool
from rayvec.rollout.loop import rollout
from rayvec.training import checkpoint

CONFIG = PPOConfig()


@pytest.fixture
def learner() -> PPOLearner:
    torch.set_num_threads(CONFIG.learner_threads)
    env = gymnasium.make(CONFIG.env_id)
    return PPOLearner(env.observation_space, env.action_space, CONFIG)


def make_batch(learner: PPOLearner) -> Batch:
    pool = SerialPool(EnvFactory.build(CONFIG.env_id, CONFIG.num_envs))
    chunk = rollout(pool, Policy(learner.module), CONFIG.num_steps)
    pool.close()
    steps = CONFIG.steps_per_iteration
    stats = CollectStats(np.zeros(0), np.zeros(0, np.int64), steps, 0, 0, 1.0, float(steps), {}, (0, 0))
    return Batch((chunk,), stats)


def test_ppo_update(benchmark: Any, learner: PPOLearner) -> None:
    benchmark(learner.update, make_batch(learner))


@pytest.mark.parametrize("num_envs", [1, 16, 64])
def test_policy_acts(benchmark: Any, learner: PPOLearner, num_envs: int) -> None:
    policy = Policy(learner.module)
    noise = np.random.default_rng(0).random((num_envs, policy.noise.lanes))
    benchmark(policy.act, np.zeros((num_envs, 4), np.float32), noise)


@pytest.mark.parametrize("shape", [(128, 8), (128, 128), (2048, 64)], ids=str)
def test_gae(benchmark: Any, shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    value, next_value = generator.random((2, *shape), np.float32)
    terminated, truncated = generator.random((2, *shape)) < 0.01
    benchmark(gae, generator.random(shape), value, next_value, terminated, truncated, gamma=0.99, lam=0.95)


def test_checkpoint(benchmark: Any, learner: PPOLearner, tmp_path: Path) -> None:
    benchmark(checkpoint.save, tmp_path / "checkpoint.pt", {"learner": learner.state_dict()})
