"""Wrappers that tests name as "helpers.wrap:function"."""

from __future__ import annotations

import resource
from typing import Any, ClassVar

import gymnasium
import numpy as np

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


class _FillsTheDisk(_Until):
    def reward(self, reward: float) -> float:
        if self.left < 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return reward


def breaks(env: Env) -> Env:
    return _Until(env, 40)


def goes_blind(env: Env) -> Env:
    return _Blind(env, 40)


def fills_the_disk(env: Env) -> Env:
    """After 30 steps, no file of this process can grow beyond 20 kB: a write fails as on a full disk."""
    return _FillsTheDisk(env, 30)


def doubled(env: Env) -> Env:
    return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * float(reward))


class _Pictured(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws the angle of CartPole's pole as a grey picture with odd sides."""

    def render(self) -> Any:
        angle = float(self.unwrapped.state[2])  # type: ignore[attr-defined]
        return np.full((33, 47, 3), 128 + int(angle * 400), np.uint8)


class _AllAllowed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Has an action mask in its infos."""

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        return obs, {**info, "action_mask": np.ones(2, np.int8)}

    def step(self, action: Any) -> Any:
        *answer, info = self.env.step(action)
        return (*answer, {**info, "action_mask": np.ones(2, np.int8)})


class _Unpictured(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Has no render mode."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}


def pictured(env: Env) -> Env:
    return _Pictured(env)


def all_allowed(env: Env) -> Env:
    return _AllAllowed(env)


def unpictured(env: Env) -> Env:
    return _Unpictured(env)
