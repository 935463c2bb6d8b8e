"""Training on native sub-batches: SAC and IMPALA, several ranks, and a run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.training_kit import HERE

import rayvec
from rayvec.training.run_dir import load_run

pytestmark = pytest.mark.timeout(600)

COMMON: dict[str, Any] = {**HERE, "eval_episodes": 2, "seed": 3}
SAC: dict[str, Any] = {**COMMON, "native": "helpers.native_envs:pendulums", "num_envs": 4, "num_steps": 10}
SAC |= {"total_steps": 400, "learning_starts": 200, "batch_size": 32, "inference": "driver"}
PPO: dict[str, Any] = {**COMMON, "native": "helpers.native_envs:cartpoles", "num_envs": 8, "num_steps": 16}
PPO |= {"total_steps": 512, "minibatch_size": 32}


def test_sac_learns_from_transitions_alone(tmp_path: Path) -> None:
    """A reset takes a step of its own, which is not in the replay."""
    result = rayvec.train(rayvec.SACConfig(run_dir=tmp_path / "run", **SAC))
    assert np.isfinite(result.eval_return_mean)
    _, state = load_run(result.run_dir)
    assert result.total_steps >= 400 and state["progress"]["episodes"] == 4 * (result.total_steps // 4 // 50)


@pytest.mark.parametrize("inference", ["worker", "driver"])
def test_the_mask_of_a_last_observation_allows_nothing(tmp_path: Path, inference: Any) -> None:
    """With NEXT_STEP the policy sees that observation: its action has no effect, the next step resets."""
    settings = {**PPO, "native": "helpers.native_envs:masked", "inference": inference}
    assert rayvec.train(rayvec.PPOConfig(run_dir=tmp_path / "run", **settings)).total_steps >= 512
