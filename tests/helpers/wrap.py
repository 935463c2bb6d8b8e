"""Wrappers that tests name as "helpers.wrap:function"."""

from __future__ import annotations

from typing import Any

import gymnasium

Env = gymnasium.Env[Any, Any]


class _Until(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Works for some steps."""

    def __init__(self, env: Env, steps: int) -> None:
        super().__init__(env)
        self.left = steps

    def step(self, action: Any) -> Any:
        self.left -= 1
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, self.reward(float(reward)), terminated, truncated, info

    def reward(self, reward: float) -> float:
        if self.left < 0:
            raise RuntimeError("the environment wears out")
        return reward


class _Blind(_Until):
    def reward(self, reward: float) -> float:
        return reward if self.left >= 0 else float("nan")


def breaks(env: Env) -> Env:
    return _Until(env, 40)


def goes_blind(env: Env) -> Env:
    return _Blind(env, 40)


def doubled(env: Env) -> Env:
    return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * float(reward))
