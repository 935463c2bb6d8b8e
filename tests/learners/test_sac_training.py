"""SAC end to end: it learns, stops, and goes on where it was."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayvec
from rayvec import SACConfig
from rayvec.errors import EnvError
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


def test_a_resumed_run_has_the_same_replay(tmp_path: Path) -> None:
    run_dir = rayvec.train(tiny(tmp_path / "a", total_steps=128, eval_episodes=0)).run_dir
    before = load_run(run_dir)[1]["learner"]
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace("total_steps: 128", "total_steps: 192"))
    rayvec.resume(run_dir)
    after = load_run(run_dir)[1]["learner"]
    assert after["num_updates"] == 128
    assert torch.equal(after["replay"]["rew"][:32], before["replay"]["rew"][:32])


def test_a_reward_that_is_not_finite_ends_a_run_with_a_good_checkpoint(tmp_path: Path) -> None:
    """Rewards are NaN after 40 steps of each environment; so few are drawn from the replay that it might go unseen."""
    config = tiny(tmp_path / "a", batch_size=4, num_envs=4, update_to_data=0.1, total_steps=600)
    failing = replace(config, wrappers=("helpers.wrap:goes_blind",), checkpoint_interval_s=0.0)
    with pytest.raises(EnvError, match="nan as the reward of step 40 of environment 0") as caught:
        rayvec.train(failing)
    assert caught.value.__notes__ == [f"resume with: rayvec train sac --resume {config.run_dir}"]
    state = load_run(tmp_path / "a")[1]
    assert state["progress"]["steps"] == 160 and state["learner"]["num_updates"] == 9
    replay = state["learner"]["replay"]
    assert replay["sizes"].tolist() == [40] * 4 and bool(replay["rew"].isfinite().all())


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
