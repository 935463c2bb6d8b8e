"""Settings, spaces and devices that can't work, and what their refusals say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.sac_kit import make_learner

from rayvec.errors import ConfigError


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
