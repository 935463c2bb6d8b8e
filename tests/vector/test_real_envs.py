"""Environments that people use, against Gymnasium's own vector environment: images, physics, text, Atari."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from helpers.testing import assert_identical

from rayvec.vector.make_vec import make_vec
from rayvec.vector.ray_vec_env import RayVecEnv

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


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["MiniGrid-Empty-5x5-v0", "ale_py:ALE/Breakout-v5"])
def test_frames_are_rendered_on_the_workers(make_vec: Any, env_id: str) -> None:
    kwargs = {"render_mode": "rgb_array"}
    reference = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env_id, **kwargs)] * 2)
    env = make_vec(env_id, nodes=2, num_envs=2, env_kwargs=kwargs)
    assert_identical(env.reset(seed=1), reference.reset(seed=1))
    for _ in range(3):
        frames, expected = env.render(), reference.render()
        assert len(frames) == 2 and expected is not None
        for mine, theirs in zip(frames, expected, strict=True):
            assert_identical(mine, theirs)
        env.step(np.ones(2, int))
        reference.step(np.ones(2, int))
    assert frames[0].ndim == 3 and frames[0].any()
    reference.close()


def test_make_vec_tells_settings_of_the_environment_from_ours(ray_cluster: object) -> None:
    with make_vec("CartPole-v1", 2, num_nodes=1, workers_per_node=1, sutton_barto_reward=True) as env:
        assert isinstance(env, RayVecEnv)
        env.reset(seed=0)
        assert env.step(env.action_space.sample())[1].tolist() == [0.0, 0.0]
    assert "sutton_barto_reward" not in gymnasium.spec("CartPole-v1").kwargs
