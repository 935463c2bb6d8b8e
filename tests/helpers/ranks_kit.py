"""Learners of an actor-critic and batches for tests on several ranks: importable by the ranks' own processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from helpers.actor_critic_kit import OBS, make_chunk
from rayvec.config import IMPALAConfig, PPOConfig
from rayvec.data import Batch, CollectStats
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.networks import ActorCritic
from rayvec.policies.policy import Policy

T, N = 8, 7
STATS = CollectStats(np.zeros(0), np.zeros(0, np.int64), T * N, 0, 0, 1.0, 1.0, {}, (0, 0))


class DoubleActorCritic(ActorCritic):
    """An actor-critic that computes in float64."""

    def encode(self, obs: Any) -> Tensor:
        return torch.from_numpy(self.encoder(obs))


def make_module(action_space: spaces.Space[Any], dtype: torch.dtype) -> ActorCritic:
    module = ActorCritic(OBS, action_space, (16, 16), seed=1)
    if dtype == torch.float64:
        encoder = module.encoder
        module.double().__class__ = DoubleActorCritic
        module.encoder = lambda obs: encoder(obs).astype(np.float64)  # type: ignore[assignment]
    return module


def make_learner(
    action_space: spaces.Space[Any],
    dtype: torch.dtype = torch.float32,
    kind: type[PPOLearner] = PPOLearner,
    **settings: Any,
) -> PPOLearner:
    usual = {"num_envs": N, "num_steps": T, "minibatch_size": 16, "num_epochs": 2, "learning_rate": 1e-3}
    config = PPOConfig(**{"total_steps": 40 * T * N, "entropy_coef": 0.01, "seed": 5, **usual, **settings})
    return kind(OBS, action_space, config, module=make_module(action_space, dtype))


def make_impala(action_space: spaces.Space[Any], dtype: torch.dtype = torch.float32, **settings: Any) -> IMPALALearner:
    usual = {"num_envs": N, "num_steps": T, "num_minibatches": 3, "learning_rate": 1e-3, "seed": 5}
    config = IMPALAConfig(**{"total_steps": 80 * T * N, **usual, **settings})
    return IMPALALearner(OBS, action_space, config, module=make_module(action_space, dtype))


def make_lonely() -> Any:
    """Returns a learner that knows nothing of ranks."""

    class Lonely:
        def weights(self) -> np.ndarray[Any, Any]:
            return np.ones(3, np.float32)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    return Lonely()


def make_batches(action_space: spaces.Space[Any], count: int, num_envs: int = N) -> list[Batch]:
    """Batches of two chunks each, with episodes that end in both ways and steps that did not happen."""
    policy = Policy(ActorCritic(OBS, action_space, (16, 16), seed=1))
    chunks = [make_chunk(policy, seed, num_steps=T, num_envs=num_envs, invalid=True) for seed in range(2 * count)]
    return [Batch(tuple(chunks[first : first + 2]), STATS) for first in range(0, 2 * count, 2)]
