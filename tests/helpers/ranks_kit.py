"""Learners of an actor-critic and batches for tests on several ranks: importable by the ranks' own processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from helpers.actor_critic_kit import BOX, DISCRETE, MASKED, OBS, make_chunk
from rayvec.config import IMPALAConfig, PPOConfig
from rayvec.data import Batch, CollectStats
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.own_network import make_module
from rayvec.policies.policy import Policy

T, N = 9, 7
STATS = CollectStats(np.zeros(0), np.zeros(0, np.int64), T * N, 0, 0, 1.0, 1.0, {}, (0, 0))
SPACES = {"discrete": (OBS, DISCRETE), "box": (OBS, BOX), "masked": (MASKED, DISCRETE)}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ppo": (PPOLearner, PPOConfig, {"minibatch_size": 16, "num_epochs": 2, "entropy_coef": 0.01}),
    "impala": (IMPALALearner, IMPALAConfig, {"num_minibatches": 3}),
}


def in_double(module: Any) -> Any:
    """Lets a network compute in float64."""

    class Double(type(module)):  # type: ignore[misc]
        def encode(self, obs: Any) -> Any:
            rows = super().encode(obs)
            return (rows[0].double(), rows[1]) if self.is_masked else rows.double()

    module.double().__class__ = Double
    return module


def make_learner(
    algorithm: str = "ppo", spaces: str = "discrete", dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    kind, config_class, own = KINDS[algorithm]
    usual = {"num_envs": N, "num_steps": T, "total_steps": 80 * T * N, "learning_rate": 1e-3, "seed": 5}
    config = config_class(**{**usual, "hidden_sizes": (16, 16), **own, **settings})
    module = make_module(*SPACES[spaces], config)
    return kind(*SPACES[spaces], config, module=in_double(module) if dtype == torch.float64 else module)


def make_batches(count: int, num_envs: int = N, spaces: str = "discrete", **settings: Any) -> list[Batch]:
    """Batches of two chunks each, with episodes that end in both ways and steps that did not happen."""
    policy = Policy(make_learner("ppo", spaces, **settings).module)
    kinds: dict[str, Any] = {"num_steps": T, "num_envs": num_envs, "invalid": True, "space": SPACES[spaces][0]}
    chunks = [make_chunk(policy, seed, **kinds) for seed in range(2 * count)]
    return [Batch(tuple(chunks[first : first + 2]), STATS) for first in range(0, 2 * count, 2)]
