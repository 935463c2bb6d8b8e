"""A policy trained by rayvec acts and learns in a script for Tianshou, and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from helpers import tianshou_algorithms as kit
from helpers.training_kit import sac, tiny
from tianshou.algorithm import PPO
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv

import rayvec
from rayvec.errors import ConfigError
from rayvec.tianshou import load_policy, save_policy

SAC = {"num_steps": 8, "learning_starts": 64, "total_steps": 192}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Discrete": (tiny, {"total_steps": 192, "normalize_obs": True}),
    "Box": (tiny, {"total_steps": 192, "env_id": "Pendulum-v1", "normalize_obs": True}),
    "SAC": (sac, {**SAC, "env_id": "Pendulum-v1"}),
    "discrete SAC": (sac, SAC),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_takes_the_same_actions_and_comes_back(tmp_path: Path, name: str) -> None:
    make_config, changes = RUNS[name]
    rayvec.train(make_config(tmp_path / "a", **{"eval_episodes": 0, **changes}))
    agent, policy = rayvec.load(tmp_path / "a"), load_policy(tmp_path / "a")
    agent.observation_space.seed(1)
    obs = np.stack([agent.observation_space.sample() for _ in range(40)]).clip(-2, 2)
    act = policy.map_action(policy(Batch(obs=obs, info=Batch())).act)
    np.testing.assert_allclose(act, agent.predict(obs), atol=1e-5)
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            parameter.add_(0.1)
    save_policy(policy, tmp_path / "a" / "tianshou.pt")
    back = rayvec.load(tmp_path / "a", "tianshou.pt")
    act = policy.map_action(policy(Batch(obs=obs, info=Batch())).act)
    np.testing.assert_allclose(back.predict(obs), act, atol=1e-5)


@pytest.mark.slow
def test_tianshou_trains_it_further(tmp_path: Path) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    policy = load_policy(tmp_path / "a")
    algorithm = PPO(policy=policy, critic=kit.actor_critic(4, 2)["critic"], optim=kit.adam())
    envs = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    kit.train(algorithm, Collector(algorithm, envs, VectorReplayBuffer(200, 2)), epoch_num_steps=100)
    save_policy(policy, tmp_path / "a" / "tianshou.pt")
    before, after = rayvec.load(tmp_path / "a"), rayvec.load(tmp_path / "a", "tianshou.pt")
    obs = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    np.testing.assert_array_equal(after.predict(obs), policy(Batch(obs=obs, info=Batch())).act.numpy())
    pairs = zip(before.module.actor.parameters(), after.module.actor.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_what_does_not_come_from_a_run(tmp_path: Path) -> None:
    other = kit.actor_critic(4, 2)["policy"]
    with pytest.raises(ConfigError, match="load_policy"):
        save_policy(other, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_policy(tmp_path / "nowhere")
