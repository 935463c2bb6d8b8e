"""What compile="auto" decides: from settings and observations alone, and alike on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rayvec.config import IMPALAConfig, PPOConfig, SACConfig
from rayvec.learners.compile_decision import choice_of, compiles
from rayvec.training.runs import wait_limit_s

NUMBERS = spaces.Box(-1, 1, (3,), np.float32)
LONG: dict[str, Any] = {"preset": "none", "total_steps": 100_000_000}


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (PPOConfig, {}, False),
        (IMPALAConfig, {}, False),
        (SACConfig, {"total_steps": 10_000}, False),
        (PPOConfig, LONG, True),
        (IMPALAConfig, LONG, True),
        (SACConfig, LONG, True),
        (PPOConfig, {**LONG, "network": "some.module:function"}, False),
        (PPOConfig, {**LONG, "learner_device": "cuda"}, False),
        (PPOConfig, {"compile": True}, True),
        (SACConfig, {**LONG, "compile": False}, False),
    ],
    ids=str,
)
def test_long_runs_compile_unless_settings_say_otherwise(kind: Any, settings: dict[str, Any], expected: bool) -> None:
    config = kind(**settings)
    assert compiles(config, NUMBERS) is expected
    choice = choice_of(config, NUMBERS)
    if not expected or config.compile is True:
        assert choice is None
    else:
        assert choice is not None and "(compile='auto')" in choice
        assert wait_limit_s(config) > wait_limit_s(PPOConfig())
