"""What compile="auto" decides: from settings and observations alone, and alike on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rayvec.config import IMPALAConfig, PPOConfig, SACConfig, TrainConfig
from rayvec.learners.compile_decision import choice_of, compiles
from rayvec.training.runs import wait_limit_s

NUMBERS = spaces.Box(-1, 1, (3,), np.float32)
LONG: list[TrainConfig] = [
    PPOConfig(preset="none", total_steps=10_000_000),
    IMPALAConfig(preset="none", total_steps=100_000_000),
    SACConfig(total_steps=100_000),
]


@pytest.mark.parametrize(
    "config", [PPOConfig(), IMPALAConfig(), SACConfig(total_steps=10_000)], ids=lambda c: c.algorithm
)
def test_short_runs_stay_uncompiled(config: TrainConfig) -> None:
    assert not compiles(config, NUMBERS) and choice_of(config, NUMBERS) is None


@pytest.mark.parametrize("config", LONG, ids=lambda c: c.algorithm)
def test_long_runs_compile(config: TrainConfig) -> None:
    assert compiles(config, NUMBERS)
    choice = choice_of(config, NUMBERS)
    assert choice is not None and choice.startswith("updates are compiled: ") and "(compile='auto')" in choice
    assert wait_limit_s(config) > wait_limit_s(PPOConfig())


@pytest.mark.parametrize("settings", [{"network": "some.module:function"}, {"learner_device": "cuda"}])
def test_what_was_not_measured_stays_uncompiled(settings: dict[str, Any]) -> None:
    config = PPOConfig(preset="none", total_steps=10_000_000, **settings)
    assert not compiles(config, NUMBERS) and choice_of(config, NUMBERS) is None


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("make", [PPOConfig, IMPALAConfig, SACConfig])
def test_settings_come_first(make: Any, chosen: bool) -> None:
    config = make(compile=chosen)
    assert compiles(config, NUMBERS) is chosen and choice_of(config, NUMBERS) is None
    assert TrainConfig.from_yaml(config.to_yaml()).compile is chosen  # type: ignore[attr-defined]
