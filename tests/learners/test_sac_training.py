"""SAC end to end: it learns, stops, and goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayvec
from rayvec import SACConfig
from rayvec.training.run_dir import load_run

pytestmark = pytest.mark.usefixtures("ray_cluster")


def tiny(run_dir: Path, **changes: Any) -> SACConfig:
    usual: dict[str, Any] = {"num_steps": 8, "learning_starts": 64, "batch_size": 32, "hidden_sizes": (16, 16)}
    return SACConfig(**{**usual, "workers_per_node": 1, "eval_episodes": 2, "run_dir": run_dir, **changes})


@pytest.mark.parametrize(
    "env_id", ["Pendulum-v1", pytest.param("CartPole-v1", marks=pytest.mark.slow)], ids=["box", "discrete"]
)
def test_a_run_of_either_kind_begins_at_random_and_then_updates_at_its_ratio(tmp_path: Path, env_id: str) -> None:
    result = rayvec.train(tiny(tmp_path / "a", env_id=env_id, total_steps=192, update_to_data=0.5))
    state = load_run(result.run_dir)[1]
    assert state["learner"]["num_updates"] == 64
    assert state["learner"]["replay"]["sizes"].tolist() == [48] * 4
    assert np.isfinite(result.eval_return_mean)


@pytest.mark.slow
def test_it_learns_pendulum(tmp_path: Path) -> None:
    config = tiny(tmp_path / "a", learning_starts=600, batch_size=128, hidden_sizes=(64, 64), eval_episodes=10)
    result = rayvec.train(replace(config, total_steps=4_000))
    assert result.eval_return_mean > -500  # random actions: about -1200
