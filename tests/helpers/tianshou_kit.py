"""Policies of Tianshou, and environments for them, that tests send to workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch

from helpers.exact import DriftEnv


def numbers(obs: Any) -> Any:
    """Sums the sixteenths of every number of each observation, as integers: the same in any batch."""
    leaves = list(obs.values()) if isinstance(obs, Batch | dict) else [obs]
    return sum(np.floor(np.asarray(leaf, float) * 16).astype(int).reshape(len(leaf), -1).sum(1) for leaf in leaves)


class Exact(Policy):
    """Integer arithmetic on the observation and on a number that is learnt; records what it computes."""

    def __init__(self, space: Any = None, **kwargs: Any) -> None:
        super().__init__(action_space=space or spaces.Discrete(2), **kwargs)
        self.shift = torch.nn.Parameter(torch.tensor([3.0]))
        self.register_buffer("steps", torch.tensor([5], dtype=torch.int64))

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        value = numbers(batch.obs) + int(self.shift) + int(self.steps)
        if isinstance(self.action_space, spaces.Box):
            act: Any = ((value % 9)[:, None] / 4.0 - 1.0).astype(np.float32)
        else:
            act = value % 2
        return Batch(act=act, policy=Batch(value=value))

    def add_exploration_noise(self, act: Any, batch: Any) -> Any:
        return 1 - act if isinstance(self.action_space, spaces.Discrete) else act * 0.5


class Remembers(Policy):
    """Counts the steps of each episode in its hidden state, and acts by the count."""

    def __init__(self) -> None:
        super().__init__(action_space=spaces.Discrete(2))

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        n = len(batch.obs)
        count = torch.zeros(n, 1) if state is None else state["hidden"]
        value = numbers(batch.obs) + count[:, 0].numpy().astype(int) // 2
        return Batch(act=value % 2, state=Batch(hidden=count + 1.0, other=Batch(cell=count * 2.0)))


class Agents(DriftEnv):
    """Rewards three agents at once; a test may set a step of the episode in which it raises."""

    raise_at: int | None = None

    def step(self, action: Any) -> Any:
        obs, rew, terminated, truncated, info = super().step(action)
        if self._t == self.raise_at:
            raise ValueError("it fails once: the environment that replaces it has no such step")
        return obs, np.array([rew, -rew, self._t]), terminated, truncated, {**info, "t": self._t}


class Pointed(DriftEnv):
    """Drifts by a continuous action, and says things in infos, some of them only when an episode ends."""

    observation_space: Any = spaces.Dict({name: spaces.Box(-np.inf, np.inf, (1,), np.float32) for name in "vx"})
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, _ = super().reset(seed=seed)
        return {"x": obs[:1], "v": obs[1:]}, {"fresh": True}

    def step(self, action: Any) -> Any:
        obs, rew, terminated, truncated, _ = super().step(action[0] > 0)
        info: dict[str, Any] = {"x": float(obs[0]), "pushed": action}
        if terminated or truncated:
            info["episode"] = {"l": self._t, "r": rew}
        return {"x": obs[:1], "v": obs[1:]}, rew, terminated, truncated, info
