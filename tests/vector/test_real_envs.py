"""Environments that people use, against Gymnasium's own vector environment: images, physics, text, Atari."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import gymnasium
import pytest
from helpers.testing import assert_identical

IDS = ["ale_py:ALE/Breakout-v5", "HalfCheetah-v5", "MiniGrid-DoorKey-5x5-v0"]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other projects' deprecations
        importlib.import_module("minigrid")
        yield


@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.slow)])
@pytest.mark.parametrize("env_id", [*IDS[:-1], pytest.param(IDS[-1], marks=pytest.mark.slow)])
def test_equal_to_the_last_bit(make_vec: Any, env_id: str, mode: str) -> None:
    kwargs = {"max_episode_steps": 12}
    reference = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env_id, **kwargs)] * 3, autoreset_mode=mode)
    env = make_vec(env_id, nodes=2, num_envs=3, env_kwargs=kwargs, autoreset_mode=mode)
    assert env.observation_space == reference.observation_space
    assert_identical(env.reset(seed=7), reference.reset(seed=7))
    reference.action_space.seed(0)
    for _ in range(30):
        actions = reference.action_space.sample()
        assert_identical(env.step(actions), reference.step(actions))
    reference.close()
