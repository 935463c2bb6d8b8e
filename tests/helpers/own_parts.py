"""Networks of a user, in a module that can be imported by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class TwoHeads(nn.Module):
    """Numbers to parameters and a value, whatever the spaces."""

    def __init__(self, observation_space: Any, action_space: Any, units: int = 8) -> None:
        super().__init__()
        inputs = spaces.flatdim(observation_space)
        outputs = spaces.flatdim(action_space) * (2 if isinstance(action_space, spaces.Box) else 1)
        self.body = nn.Sequential(nn.Linear(inputs, units), nn.ReLU())
        self.policy, self.value = nn.Linear(units, outputs), nn.Linear(units, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(obs.float().flatten(1))
        return self.policy(features), self.value(features)


def two_heads(observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    return TwoHeads(observation_space, action_space)


def too_many_outputs(observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    return TwoHeads(observation_space, spaces.Discrete(7))


def frozen_in_float16(observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    net = TwoHeads(observation_space, action_space)
    net.body.half().requires_grad_(False)
    return net


def with_spectral_norm(observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    net = TwoHeads(observation_space, action_space)
    spectral_norm(net.body[0])
    return net


class ActorAndCritics(nn.Module):
    """Networks for SAC: an actor and two critics."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        num_obs, num_act = int(np.prod(observation_space.shape)), spaces.flatdim(action_space)
        is_box = isinstance(action_space, spaces.Box)
        self.actor = _mlp(num_obs, 2 * num_act if is_box else num_act)
        self.critics = nn.ModuleList(_Critic(num_obs + num_act) if is_box else _mlp(num_obs, num_act) for _ in range(2))


class _Critic(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.net = _mlp(inputs, 1)

    def forward(self, obs: Tensor, act: Tensor) -> Tensor:
        value: Tensor = self.net(torch.cat([obs, act], -1)).squeeze(-1)
        return value


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def actor_and_critics(observation_space: Any, action_space: Any, config: Any) -> nn.Module:
    return ActorAndCritics(observation_space, action_space)
