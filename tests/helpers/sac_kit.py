"""SAC learners and batches for tests: importable by the processes of ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rayvec.config import SACConfig
from rayvec.data import Batch, Chunk, CollectStats
from rayvec.learners.sac import SACLearner

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
DISCRETE = spaces.Discrete(3, start=1)
STATS = CollectStats(np.zeros(0), np.zeros(0, np.int64), 0, 0, 0, 1.0, 1.0, {}, (0, 0))
N = 4


def make_config(**settings: Any) -> SACConfig:
    usual: dict[str, Any] = {"num_envs": N, "learning_starts": 16, "batch_size": 12, "replay_size": 400, "seed": 3}
    return SACConfig(**{**usual, "hidden_sizes": (8, 6), "tau": 0.1, "policy_lr": 3e-3, **settings})


def make_learner(action_space: spaces.Space[Any] = BOX, *, dtype: Any = torch.float64, **settings: Any) -> SACLearner:
    return SACLearner(OBS, action_space, make_config(**settings), dtype=dtype)


def make_chunk(action_space: spaces.Space[Any], seed: int, num_steps: int = 4, *, invalid: bool = False) -> Chunk:
    """Random observations, actions and rewards, and episodes that end in both ways."""
    rng = np.random.default_rng(seed)
    action_space = copy.deepcopy(action_space)  # ranks are threads, which would share its generator
    action_space.seed(seed)
    obs = rng.normal(size=(num_steps + 1, N, 3)).astype(np.float32)
    terminated, truncated = rng.random((2, num_steps, N)) < 0.15
    valid = rng.random((num_steps, N)) > (0.3 if invalid else -1)
    terminated, truncated = terminated & valid, truncated & valid
    final_index = np.argwhere(terminated | truncated)
    return Chunk(
        env_ids=np.arange(N),
        obs=obs[:-1],
        act=np.array([[action_space.sample() for _ in range(N)] for _ in range(num_steps)]),
        rew=rng.normal(size=(num_steps, N)),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        last_obs=obs[-1],
        final_index=final_index,
        final_obs=rng.normal(size=(len(final_index), 3)).astype(np.float32),
    )


def masked_chunk(action_space: spaces.Space[Any], seed: int, **kwargs: Any) -> Chunk:
    """A chunk whose actions are allowed; masks of last observations of episodes may allow nothing."""
    chunk, rng = make_chunk(action_space, seed, **kwargs), np.random.default_rng(seed)

    def with_mask(numbers: Any, act: Any = None) -> dict[str, Any]:
        mask = rng.integers(0, 2, (*numbers.shape[:-1], 3)).astype(np.int8)
        if act is not None:
            np.put_along_axis(mask, np.asarray(act)[..., None] - DISCRETE.start, 1, -1)
        return {"numbers": numbers, "action_mask": mask}

    last = with_mask(chunk.last_obs, np.full(N, DISCRETE.start))
    return replace(chunk, obs=with_mask(chunk.obs, chunk.act), last_obs=last, final_obs=with_mask(chunk.final_obs))


def make_batch(action_space: spaces.Space[Any] = BOX, seed: int = 0, **kwargs: Any) -> Batch:
    return Batch((make_chunk(action_space, seed, **kwargs),), STATS)
