"""SAC end to end: it learns, stops, and goes on where it was."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayvec
from rayvec import SACConfig
from rayvec.training.run_dir import load_run
from rayvec.training.runs import make_env, make_learner
from rayvec.training.trainer import Progress, Trainer

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


def test_a_resumed_run_acts_at_random_until_weights_were_published(tmp_path: Path) -> None:
    """However many steps it has taken."""
    config = tiny(tmp_path / "a", num_nodes=1)
    with make_env(config) as env:
        learner = make_learner(config, env)
        with contextlib.closing(Trainer(config, env, learner, Progress()).collector) as collector:
            state = collector.state_dict()
        for version in (0, 1):
            state["version"] = version
            progress = Progress(steps=config.learning_starts + 8)
            with contextlib.closing(Trainer(config, env, learner, progress, state).collector) as collector:
                batch = collector.collect(n_step=256, ahead=False)
                is_random = collector._policy._random
            assert batch.stats.weights_versions == (version, version) and is_random == (version == 0)
