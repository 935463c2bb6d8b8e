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
FRAMES = spaces.Dict(sight=spaces.Box(0, 255, (84, 84, 4), np.uint8), touch=NUMBERS)
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


def test_images_pay_sooner() -> None:
    config = PPOConfig(preset="none", total_steps=2_000_000)
    assert compiles(config, FRAMES) and not compiles(config, NUMBERS)


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


def test_a_resumed_run_and_more_ranks_decide_alike() -> None:
    config = LONG[0]
    others = [config.adjusted(num_learners=4), TrainConfig.from_yaml(config.to_yaml())]
    assert [choice_of(other, NUMBERS) for other in others] == 2 * [choice_of(config, NUMBERS)]


@pytest.mark.parametrize("make", [PPOConfig, IMPALAConfig])
def test_longer_sequences_take_longer_to_compile(make: Any) -> None:
    """All steps of a sequence are in the graph, so that a run that compiles with short ones may not with long ones."""
    usual = {"recurrent": "gru", "num_steps": 256, "burn_in": 2, "preset": "none"}
    per_step = make(**usual, total_steps=10**9).minibatches[0] / 10**9
    enough, plenty = (int(count / per_step) for count in (100_000, 1_000_000))
    short, long, longer = (
        make(**usual, sequence_length=length, total_steps=total)
        for length, total in ((4, enough), (256, enough), (256, plenty))
    )
    assert [compiles(each, NUMBERS) for each in (short, long, longer)] == [True, False, True]
    assert "39 s that compiling costs" in (choice_of(short, NUMBERS) or "")
    assert wait_limit_s(longer) > wait_limit_s(short)
