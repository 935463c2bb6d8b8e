"""Spaces, chunks and batches for learners of an actor-critic, and what their references are written with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rayvec.config import IMPALAConfig, PPOConfig
from rayvec.data import Batch, Chunk, CollectStats, tree_map
from rayvec.policies.noise import keyed_noise
from rayvec.policies.policy import Policy

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE, BOX = spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)
SPACES = pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
FAR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
SIGHT = spaces.Box(0, 255, (2, 36, 36), np.uint8)
MIXED = spaces.Dict(sight=SIGHT, touch=FAR)
MASKED = spaces.Dict(touch=OBS, action_mask=spaces.MultiBinary(3))
T, N = 16, 4
STATS = CollectStats(np.zeros(0), np.zeros(0, np.int64), T * N, 0, 0, 1.0, 1.0, {}, (0, 0))


def ppo_config(**settings: Any) -> PPOConfig:
    usual: dict[str, Any] = {"total_steps": 10 * T * N, "num_envs": N, "num_steps": T, "minibatch_size": 16}
    usual |= {"num_epochs": 3, "normalize_reward": False}
    return PPOConfig(**{"hidden_sizes": (8,), "learning_rate": 0.01, **usual, **settings})


def impala_config(**settings: Any) -> IMPALAConfig:
    usual = {"total_steps": 10 * T * N, "num_envs": N, "num_steps": T, "num_minibatches": 2, "learning_rate": 0.01}
    usual["normalize_reward"] = False
    return IMPALAConfig(**{"hidden_sizes": (8,), "entropy_coef": 0.1, **usual, **settings})


def draw_obs(space: spaces.Space[Any], rng: np.random.Generator, *lead: int) -> Any:
    """Random observations, tree of ``[*lead, *obs_shape]``."""
    shape = (*lead, *(space.shape or ()))
    match space:
        case spaces.Dict():
            return {key: draw_obs(part, rng, *lead) for key, part in space.items()}
        case spaces.Tuple():
            return tuple(draw_obs(part, rng, *lead) for part in space)
        case spaces.Discrete():
            return rng.integers(0, space.n, lead)
        case spaces.MultiDiscrete():
            return rng.integers(0, space.nvec, shape)
        case spaces.MultiBinary():  # may be an action mask, which allows one choice of each three at least
            return ((rng.random(shape) < 0.5) | (np.arange(space.n) % 3 == 0)).astype(np.int8)
        case spaces.Box() if space.dtype == np.uint8:
            return rng.integers(0, 256, shape, np.uint8)
    mean, spread = (2, 3) if space is FAR else (0, 1)
    return rng.normal(mean, spread, shape).astype(np.float32)


def make_chunk(
    policy: Policy,
    seed: int,
    *,
    num_steps: int = T,
    num_envs: int = N,
    invalid: bool = False,
    space: spaces.Space[Any] = OBS,
) -> Chunk:
    """Random observations and rewards, the policy's own actions, and episodes that end in both ways.

    A policy with a hidden state continues from the chunk before.
    """
    rng, remembers = np.random.default_rng(seed), policy.initial_state(1) is not None
    obs = draw_obs(space, rng, num_steps + 1, num_envs)
    noise = keyed_noise(policy.noise, seed=seed, env_ids=np.arange(num_envs), first_step=0, num_steps=num_steps)
    terminated, truncated = rng.random((2, num_steps, num_envs)) < (0.1 if remembers else 0.15)
    valid = np.ones((num_steps, num_envs), bool)
    if invalid:
        valid = rng.random((num_steps, num_envs)) > (0.15 if remembers else 0.3)
    if remembers:  # the step before one that failed is the last of its episode
        truncated[:-1] |= ~valid[1:]
    terminated, truncated = terminated & valid, truncated & valid
    steps: list[Any] = []
    states = []
    for t in range(num_steps):
        if remembers and (state := policy.state_to_record(t, num_envs)) is not None:
            states.append(state.copy())
        steps.append(policy.act(tree_map(lambda leaf: leaf[t], obs), noise[t]))  # noqa: B023
        if remembers:
            policy.begin_episodes(np.flatnonzero(terminated[t] | truncated[t] | ~valid[t]))
    final_index = np.argwhere(terminated | truncated)
    return Chunk(
        env_ids=np.arange(num_envs),
        obs=tree_map(lambda leaf: leaf[:-1], obs),
        act=np.stack([act for act, _ in steps]),
        rew=rng.normal(size=(num_steps, num_envs)),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        last_obs=tree_map(lambda leaf: leaf[-1], obs),
        final_index=final_index,
        final_obs=draw_obs(space, rng, len(final_index)),
        extras={name: np.stack([extras[name] for _, extras in steps]) for name in steps[0][1]},
        **({"states": np.stack(states)} if states else {}),
    )


def make_batch(policy: Policy, seed: int = 0, **kwargs: Any) -> Batch:
    return Batch((make_chunk(policy, seed, **kwargs),), STATS)


def perturb(module: nn.Module, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def distance(ours: Any, theirs: Any) -> float:
    """Returns the Euclidean distance between two vectors over the length of the second."""
    return float(np.linalg.norm(np.asarray(ours) - np.asarray(theirs)) / np.linalg.norm(theirs))
