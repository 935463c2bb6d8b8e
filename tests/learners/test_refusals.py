"""Settings, spaces and devices that can't work, and what their refusals say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.sac_kit import make_learner

from rayvec.config import IMPALAConfig, PPOConfig, SACConfig
from rayvec.errors import ConfigError

GRU = {"recurrent": "gru"}


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (
            PPOConfig,
            {"minibatch_size": 9, "num_envs": 2, "num_steps": 4},
            r"minibatch_size is 9\. .* num_envs \* num_steps = 8",
        ),
        (PPOConfig, {"compile": "maybe"}, "compile is maybe. It must be 'auto' or a valid boolean"),
        (PPOConfig, {"minibatch_size": 1}, "minibatches of one step.*normalize_advantage=False"),
        (PPOConfig, {"num_envs": 1, "num_steps": 7, "minibatch_size": 2}, "minibatches of one step"),
        (PPOConfig, {**GRU, "num_envs": 1, "num_steps": 33, "minibatch_size": 16}, "minibatches of one step"),
        (IMPALAConfig, {"num_envs": 4, "num_minibatches": 5}, r"num_minibatches is 5\. .* at most num_envs = 4"),
        (SACConfig, {"replay_size": 100, "batch_size": 101}, r"batch_size is 101\. .* at most replay_size = 100"),
        (SACConfig, {"total_steps": 16, "learning_starts": 16}, "below total_steps = 16"),
        (PPOConfig, {**GRU, "num_steps": 64, "sequence_length": 65}, "at most num_steps = 64"),
        (IMPALAConfig, {**GRU, "num_steps": 32, "sequence_length": 33}, "at most num_steps = 32"),
        (IMPALAConfig, {**GRU, "burn_in": 16}, "below sequence_length = 16"),
        (PPOConfig, {**GRU, "minibatch_size": 15}, "minibatch_size is 15.* at least .* = 16"),
        (PPOConfig, {**GRU, "minibatch_size": 31, "num_learners": 2}, "minibatch_size is 31.* at least .* = 32"),
        (PPOConfig, {"recurrent": "rnn"}, "'gru' or 'lstm'"),
        (PPOConfig, {**GRU, "recurrent_size": 0}, "at least 1"),
        (IMPALAConfig, {**GRU, "burn_in": -1}, "at least 0"),
    ],
    ids=str,
)
def test_settings(kind: Any, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        kind(**settings)


@pytest.mark.parametrize(
    ("space", "remedy"),
    [
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), "finite bounds"),
        (spaces.Box(0, 5, (2,), np.int64), "floating-point Box"),
        (spaces.Box(0, 5, (0,), np.float32), "at least one number"),
        (spaces.MultiDiscrete([2, 2]), r"gymnasium\.wrappers\.TransformAction"),
        (spaces.MultiBinary(2), r"gymnasium\.wrappers\.TransformAction"),
    ],
    ids=["unbounded", "integers", "empty", "multi-discrete", "multi-binary"],
)
def test_action_spaces_of_sac(space: spaces.Space[Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        make_learner(space, dtype=torch.float32)
