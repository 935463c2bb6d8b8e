"""What every learner of an actor-critic promises, whatever its update is."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import DISCRETE, OBS, SPACES, N, T, impala_config, make_batch, perturb, ppo_config

from rayvec.errors import CheckpointError, LearnerError
from rayvec.learners.base import Learner
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.policy import Policy

NORMALIZED = {"normalize_obs": True, "normalize_reward": True, "clip_reward": 0.5}
MakeLearner = Callable[..., PPOLearner | IMPALALearner]


def make_ppo(action_space: spaces.Space[Any] = DISCRETE, module: Any = None, **settings: Any) -> PPOLearner:
    return PPOLearner(OBS, action_space, ppo_config(**settings), module=module)


def make_impala(action_space: spaces.Space[Any] = DISCRETE, module: Any = None, **settings: Any) -> IMPALALearner:
    return IMPALALearner(OBS, action_space, impala_config(**settings), module=module)


LEARNERS = pytest.mark.parametrize("make", [make_ppo, make_impala], ids=["ppo", "impala"])
IN_ONE_STEP = pytest.mark.parametrize(
    ("make", "one_step"),
    [(make_ppo, {"minibatch_size": T * N, "num_epochs": 1}), (make_impala, {"num_minibatches": 1})],
    ids=["ppo", "impala"],
)


@LEARNERS
@SPACES
@pytest.mark.parametrize("settings", [{}, NORMALIZED], ids=["raw", "normalised"])
def test_a_loaded_learner_continues_bit_for_bit(
    make: MakeLearner, action_space: spaces.Space[Any], settings: dict[str, Any]
) -> None:
    learner: Learner = make(action_space, seed=3, **settings)
    policy = Policy(learner.module)
    for seed in range(2):
        learner.update(make_batch(policy, seed))
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    other = make(action_space, seed=3, **settings)
    perturb(other.module, 1.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(2, 5):
        policy.load_weights(learner.weights())
        batch = make_batch(policy, seed)
        assert learner.update(batch) == other.update(batch)
        np.testing.assert_array_equal(learner.weights(), other.weights())


@LEARNERS
@pytest.mark.parametrize(
    "change",
    [{"parameters": torch.zeros(3)}, {"unknown": 1}, {"return_scale": {"count": 1}}],
    ids=["another net", "another kind of learner", "other statistics"],
)
def test_a_foreign_state_is_refused(make: MakeLearner, change: dict[str, Any]) -> None:
    learner = make()
    before = learner.weights()
    with pytest.raises(CheckpointError, match=rf"of another learner: its {next(iter(change))} differ"):
        learner.load_state_dict(learner.state_dict() | change)
    np.testing.assert_array_equal(learner.weights(), before)


@IN_ONE_STEP
@pytest.mark.parametrize("name", ["rew", "logp"])
def test_what_is_not_finite_is_an_error_and_leaves_the_weights(
    make: MakeLearner, one_step: dict[str, int], name: str
) -> None:
    learner = make(**one_step)
    batch = make_batch(Policy(learner.module))
    [chunk] = batch.chunks
    (chunk.rew if name == "rew" else chunk.extras["logp"])[3, 1] = np.nan
    before = learner.weights()
    with pytest.raises(LearnerError, match=r"not finite .*policy_loss.: nan"):
        learner.update(batch)
    np.testing.assert_array_equal(learner.weights(), before)


@LEARNERS
def test_a_batch_without_a_valid_step_changes_nothing(make: MakeLearner) -> None:
    learner = make()
    batch = make_batch(Policy(learner.module))
    batch.chunks[0].valid[:] = False
    before = learner.weights()
    assert all(np.isfinite(value) for value in learner.update(batch).values())
    np.testing.assert_array_equal(learner.weights(), before)


@LEARNERS
def test_the_learning_rate_follows_a_schedule(make: MakeLearner) -> None:
    def rates(**settings: Any) -> list[float]:
        learner = make(total_steps=4 * T * N, **settings)
        batch = make_batch(Policy(learner.module))
        return [learner.update(batch)["learning_rate"] for _ in range(5)]

    cosine = [0.3 * (1 + np.cos(np.pi * progress)) / 2 for progress in (0, 0.25, 0.5, 0.75, 1)]
    assert rates(learning_rate=0.3, learning_rate_schedule="cosine") == pytest.approx(cosine)
    assert rates(learning_rate=lambda progress: 0.1 + progress**2) == pytest.approx([0.1, 0.1625, 0.35, 0.6625, 1.1])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@LEARNERS
def test_coefficients_of_the_loss_follow_a_schedule(make: MakeLearner, compiled: bool) -> None:
    """Each update is that of a learner whose coefficient is always what the schedule has reached."""
    total = 2 * T * N
    changes = make(total_steps=total, entropy_coef=lambda progress: 0.5 * progress, compile=compiled)
    batch = make_batch(Policy(changes.module))
    for coefficient in (0.0, 0.25):
        fixed = make(total_steps=total, entropy_coef=coefficient, compile=False)
        fixed.load_state_dict(changes.state_dict())
        for learner in (fixed, changes):
            learner.update(batch)
        np.testing.assert_allclose(changes.weights(), fixed.weights(), atol=2e-6)
        other = make(total_steps=total, entropy_coef=coefficient + 0.25, compile=False)
    assert np.abs(changes.weights() - other.weights()).max() > 1e-3
