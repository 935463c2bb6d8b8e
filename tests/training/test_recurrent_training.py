"""Runs with a recurrent policy: on ranks, resumed, evaluated; and tasks that take memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.maze import register
from helpers.training_kit import HERE, assert_same, lengthen

import rayvec
from rayvec.config import IMPALAConfig, PPOConfig
from rayvec.training.run_dir import load_run

COMMON: dict[str, Any] = {
    "num_envs": 8, "num_steps": 16, "total_steps": 512, "eval_episodes": 5, "seed": 5,
    "learning_rate_schedule": "constant",
    "recurrent_size": 8, "hidden_sizes": (8,), "sequence_length": 6, **HERE,
}  # fmt: skip
CONFIGS: list[tuple[type[Any], dict[str, Any]]] = [
    (PPOConfig, {**COMMON, "recurrent": "gru", "minibatch_size": 32, "normalize_obs": True}),
    (IMPALAConfig, {**COMMON, "recurrent": "lstm", "num_minibatches": 2, "prefetch": False}),
]


@pytest.mark.parametrize(
    ("kind", "settings"), [CONFIGS[0], pytest.param(*CONFIGS[1], marks=pytest.mark.slow)], ids=["ppo", "impala"]
)
@pytest.mark.parametrize("inference", ["worker", pytest.param("driver", marks=pytest.mark.slow)])
def test_a_resumed_run_repeats_itself(tmp_path: Path, kind: Any, settings: dict[str, Any], inference: str) -> None:
    """Environments begin new episodes there, with no memory; the same twice."""
    states = []
    for name in "ab":
        run = rayvec.train(kind(run_dir=tmp_path / name, **{**settings, "inference": inference}))
        lengthen(run.run_dir, 512, 768)
        assert rayvec.resume(run.run_dir).total_steps == 768
        states.append(load_run(run.run_dir)[1]["learner"])
    assert_same(*states)


MAZE: dict[str, Any] = {"sequence_length": 32, "gamma": 0.99, "eval_episodes": 100, "seed": 1, **HERE}
PPO_IN_THE_MAZE: dict[str, Any] = {
    "total_steps": 200_000,
    "num_envs": 32,
    "num_steps": 64,
    "minibatch_size": 512,
    "num_epochs": 8,
    "learning_rate": 1e-3,
    "gae_lambda": 0.95,
    "clip_value_loss": False,
    "entropy_coef": 0.01,
    "normalize_reward": True,
}
IMPALA_IN_THE_MAZE: dict[str, Any] = {"total_steps": 150_000, "num_envs": 16, "num_steps": 32}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "settings", "recurrent"),
    [
        (PPOConfig, PPO_IN_THE_MAZE, "gru"),
        (PPOConfig, PPO_IN_THE_MAZE, "lstm"),
        (PPOConfig, PPO_IN_THE_MAZE, None),
        (IMPALAConfig, IMPALA_IN_THE_MAZE, "gru"),
    ],
    ids=["ppo-gru", "ppo-lstm", "ppo", "impala-gru"],
)
def test_a_maze_takes_memory(tmp_path: Path, kind: Any, settings: dict[str, Any], recurrent: Any) -> None:
    """The cue is seen 20 steps before it is needed; half of the choices are right without memory."""
    config = kind(env_id=register(), recurrent=recurrent, run_dir=tmp_path / "a", **MAZE, **settings)
    result = rayvec.train(config)
    if recurrent is None:
        assert 0.3 < result.eval_return_mean < 0.7
    else:
        assert result.eval_return_mean > 0.95
