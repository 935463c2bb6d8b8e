"""Action masks: what an environment does not allow is never chosen, and learning knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.own_envs import Masked
from helpers.training_kit import HERE, SMALL, sac, tiny

import rayvec
from rayvec import IMPALAConfig, PPOConfig, TrainConfig
from rayvec.errors import ConfigError, EnvError
from rayvec.learners.ppo import PPOLearner
from rayvec.training.evaluation import evaluate_run
from rayvec.wrappers import ActionMask

WRAPPED = {"wrappers": ("rayvec.wrappers:ActionMask",)}
COMMON = {**HERE, **WRAPPED, "total_steps": 256}
IMPALA = {**COMMON, "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "prefetch": False}
PPO = {**COMMON, **SMALL}
WHERE = pytest.mark.parametrize("where", ["info", "obs"])
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("where", "nvec"),
    [("info", 4), ("obs", [3, 2]), pytest.param("obs", 4, marks=SLOW), pytest.param("info", [3, 2], marks=SLOW)],
    ids=["info-discrete", "obs-multi-discrete", "obs-discrete", "info-multi-discrete"],
)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (PPOConfig, PPO),
        (IMPALAConfig, IMPALA),
        (PPOConfig, {**PPO, "recurrent": "gru", "sequence_length": 4, "normalize_obs": True}),
        pytest.param(IMPALAConfig, {**IMPALA, "recurrent": "lstm", "sequence_length": 4}, marks=SLOW),
    ],
    ids=["ppo", "impala", "ppo with memory", "impala with memory"],
)
def test_no_action_is_taken_that_is_not_allowed(
    tmp_path: Path, where: str, nvec: Any, kind: type[TrainConfig], settings: dict[str, Any]
) -> None:
    """The environment refuses such actions, in training, in the evaluation, and in one later."""
    config = kind(**{**settings, "eval_episodes": 8, "run_dir": tmp_path / "a"})
    result = rayvec.train(config, env=lambda: Masked(where, nvec))
    assert result.total_steps == 256
    evaluate_run(tmp_path / "a", num_episodes=8, env=lambda: Masked(where, nvec))


@WHERE
def test_sac_takes_no_action_that_is_not_allowed(tmp_path: Path, where: str) -> None:
    """Neither at random at first, nor as it learns; alone and on the way through a file."""
    import onnxruntime

    settings = {**WRAPPED, "num_steps": 8, "learning_starts": 64, "replay_size": 400, "total_steps": 128}
    rayvec.train(sac(tmp_path / "a", **settings, eval_episodes=4), env=lambda: Masked(where))
    evaluate_run(tmp_path / "a", num_episodes=4, env=lambda: Masked(where))
    agent, env = rayvec.load(tmp_path / "a"), ActionMask(Masked(where))
    session = onnxruntime.InferenceSession(agent.export(tmp_path / "policy.onnx"))
    obs, _ = env.reset(seed=0)
    for _ in range(6):
        action = agent.predict(obs)
        assert session.run(["action"], {key: part[None] for key, part in obs.items()})[0] == action
        obs = env.step(action)[0]


def test_without_masks_the_environment_refuses(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not allowed"):
        rayvec.train(tiny(tmp_path / "a", action_masks=False), env=Masked)
    with pytest.raises(ConfigError, match="have an action_mask"):
        rayvec.train(tiny(tmp_path / "b"), env=Masked)


def test_the_network_does_not_see_the_mask() -> None:
    space = spaces.Box(-1, 1, (3,), np.float32)
    mask = spaces.MultiBinary(4)
    plain = PPOLearner(space, spaces.Discrete(4), PPOConfig())
    for parts in ({"observation": space}, {"x": space}):
        masked = PPOLearner(spaces.Dict({**parts, "action_mask": mask}), spaces.Discrete(4), PPOConfig())
        np.testing.assert_array_equal(masked.weights(), plain.weights())
    read = PPOLearner(spaces.Dict(x=space, action_mask=mask), spaces.Discrete(4), PPOConfig(action_masks=False))
    assert len(read.weights()) > len(plain.weights())


@pytest.mark.parametrize("nvec", [3, [3, 2]], ids=["discrete", "multi-discrete"])
@WHERE
def test_a_mask_that_allows_nothing(tmp_path: Path, where: str, nvec: Any) -> None:
    with pytest.raises(ValueError, match="allows no choice") as caught:
        rayvec.train(tiny(tmp_path / "a", **WRAPPED), env=lambda: Masked(where, nvec, empty_at=4))
    assert isinstance(caught.value.__cause__, EnvError)
    assert "environment 0" in str(caught.value.__cause__)


def test_a_mask_of_another_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs 4 numbers"):
        rayvec.train(tiny(tmp_path / "a", **WRAPPED), env=lambda: Masked(size=5))
    with pytest.raises(ConfigError, match=r"action_mask.*needs shape \(4,\)"):
        rayvec.train(tiny(tmp_path / "b"), env=lambda: Masked("obs", size=5))
    assert not list(tmp_path.iterdir())
