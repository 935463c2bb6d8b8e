"""Settings, spaces and devices that can't work, and what their refusals say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.sac_kit import BOX, make_chunk, make_learner

from rayvec.errors import ConfigError
from rayvec.learners.replay import ReplayBuffer


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


def test_what_can_not_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capacity_steps is 0.*at least 1"):
        ReplayBuffer(0)
    replay, chunk = ReplayBuffer(8), make_chunk(BOX, 0, 8)
    replay.add(chunk)
    with pytest.raises(ConfigError, match=r"environments \[1, 2, 3, 4\].*\[0, 1, 2, 3\]"):
        replay.add(replace(chunk, env_ids=chunk.env_ids + 1))
