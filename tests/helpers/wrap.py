"""Wrappers that tests name as "helpers.wrap:function"."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

Env = gymnasium.Env[Any, Any]


class _Until(gymnasium.RewardWrapper[Any, Any]):
    """Changes rewards by a function after some steps."""

    def __init__(self, env: Env, steps: int, then: Callable[[float], float]) -> None:
        super().__init__(env)
        self._left, self._then = steps, then

    def reward(self, reward: Any) -> float:
        self._left -= 1
        return float(reward) if self._left >= 0 else self._then(float(reward))


def breaks(env: Env) -> Env:
    def reward(_: float) -> float:
        raise RuntimeError("the environment wears out: it is out of memory")

    return _Until(env, 40, reward)


def goes_blind(env: Env) -> Env:
    return _Until(env, 40, lambda reward: float("nan"))


def fills_the_disk(env: Env) -> Env:
    """After 30 steps, no file of this process can grow beyond 20 kB: a write fails as on a full disk."""

    def limit(reward: float) -> float:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return reward

    return _Until(env, 30, limit)


class Pictured(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws the angle of CartPole's pole as a grey picture with odd sides."""

    def render(self) -> Any:
        angle = float(self.unwrapped.state[2])  # type: ignore[attr-defined]
        return np.full((33, 47, 3), 128 + int(angle * 400), np.uint8)


class AllAllowed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Has an action mask in its infos."""

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        return obs, {**info, "action_mask": np.ones(2, np.int8)}

    def step(self, action: Any) -> Any:
        *answer, info = self.env.step(action)
        return (*answer, {**info, "action_mask": np.ones(2, np.int8)})
