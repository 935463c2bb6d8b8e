"""PPO on observations and rewards that are normalised by what was seen."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import (
    BOX,
    DISCRETE,
    FAR,
    MIXED,
    OBS,
    SIGHT,
    N,
    T,
    make_batch,
    ppo_config,
)
from helpers.thread_ranks import learn_on_ranks, on_ranks
from helpers.training_kit import assert_same

from rayvec.errors import CheckpointError, LearnerError
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.ranks import ALONE
from rayvec.learners.running_stats import ReturnScale
from rayvec.policies.policy import Policy

NORMALIZED = {"normalize_obs": True, "normalize_reward": True, "clip_reward": 0.5}


@pytest.mark.parametrize("space", [FAR, SIGHT, MIXED], ids=["numbers", "image", "both"])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_first_minibatch_has_the_probabilities_that_were_recorded(
    space: spaces.Space[Any], shared_trunk: bool
) -> None:
    """What normalises observations is what the policy acted with, in every update."""
    config = ppo_config(num_epochs=1, minibatch_size=T * N, shared_trunk=shared_trunk, **NORMALIZED)
    learner = PPOLearner(space, DISCRETE, config)
    policy = Policy(learner.module)
    for seed in range(3):
        metrics = learner.update(make_batch(policy, seed, space=space))
        assert abs(metrics["approx_kl"]) < 1e-6 and metrics["clip_fraction"] == 0
        policy.load_weights(learner.weights())


def test_observations_are_normalised_by_all_that_was_seen_before() -> None:
    learner = PPOLearner(MIXED, DISCRETE, ppo_config(normalize_obs=True))
    policy = Policy(learner.module)
    seen = []
    for seed in range(3):
        batch = make_batch(policy, seed, space=MIXED, invalid=True)
        chunk = batch.chunks[0]
        numbers = learner._samples(batch).obs[0].numpy()
        raw = chunk.obs["touch"].swapaxes(0, 1)[chunk.valid.T]
        if seen:
            before = np.concatenate(seen).astype(np.float64)
            raw = (raw - before.mean(0)) / before.std(0)
        np.testing.assert_allclose(numbers, raw.clip(-10, 10), atol=1e-5)
        seen.append(chunk.obs["touch"][chunk.valid])
        learner.update(batch)


def test_rewards_are_scaled_by_the_spread_of_discounted_returns() -> None:
    learner = PPOLearner(OBS, DISCRETE, ppo_config(normalize_reward=True, gamma=0.9))
    plain = PPOLearner(OBS, DISCRETE, ppo_config(gamma=0.9))
    policy = Policy(learner.module)
    running, returns = np.zeros(N), []
    for seed in range(3):
        batch = make_batch(policy, seed, invalid=True)
        chunk = batch.chunks[0]
        for t in range(T):
            for n in range(N):
                if not chunk.valid[t, n]:  # it failed, or the chunk was cut and the episode continues in the next one
                    running[n] *= not chunk.valid[t:, n].any()
                    continue
                running[n] = 0.9 * running[n] + chunk.rew[t, n]
                returns.append(running[n])
                running[n] *= not chunk.done[t, n]
        scaled = copy.deepcopy(batch)
        scaled.chunks[0].rew[:] /= np.std(returns)
        torch.testing.assert_close(
            learner._samples(batch).advantage, plain._samples(scaled).advantage, atol=1e-5, rtol=1e-5
        )


def test_equal_returns_are_scaled_by_their_size() -> None:
    """As in episodes of one step with a constant reward, whose returns have no deviation."""
    rew, ends = np.full((4, 2), 5.0), np.ones((4, 2), bool)
    scaled = ReturnScale(0.9)(rew, ends, ends, np.zeros(2, bool), ALONE)
    np.testing.assert_allclose(scaled, 100.0)
    assert not ReturnScale(0.9)(0 * rew, ends, ends, np.zeros(2, bool), ALONE).any()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reward_that_is_not_finite_changes_no_statistics(num_ranks: int) -> None:
    """Every rank refuses the batch, and learns from the next one."""

    def work(ranks: Any) -> None:
        scale = ReturnScale(0.9)
        rng = np.random.default_rng(ranks.rank)
        rew, none = rng.normal(size=(8, 3)), np.zeros((8, 3), bool)
        scale(rew, none, ~none, none[0], ranks)
        before, bad = scale.state_dict(), rew.copy()
        if ranks.rank == 0:
            bad[2, 1] = math.nan
        with pytest.raises(LearnerError, match="nan from environment 1 at step 2"):
            scale(bad, none, ~none, none[0], ranks)
        assert_same(scale.state_dict(), before)
        bad[2, 1] = math.inf
        scale(bad, none, ~none & np.isfinite(bad), none[0], ranks)  # a step that did not happen

    on_ranks(num_ranks, work)


def test_rewards_are_clipped() -> None:
    learner = PPOLearner(OBS, DISCRETE, ppo_config(clip_reward=0.5))
    batch = make_batch(Policy(learner.module))
    rows = learner._samples(batch)
    assert np.abs(batch.chunks[0].rew).max() > 1
    batch.chunks[0].rew.clip(-0.5, 0.5, out=batch.chunks[0].rew)
    torch.testing.assert_close(rows.advantage, learner._samples(batch).advantage)


@pytest.mark.parametrize("space", [FAR, MIXED], ids=["numbers", "both"])
def test_a_loaded_learner_normalises_on_bit_for_bit(space: spaces.Space[Any]) -> None:
    learner = PPOLearner(space, BOX, ppo_config(**NORMALIZED))
    policy = Policy(learner.module)
    for seed in range(2):
        learner.update(make_batch(policy, seed, space=space))
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    other = PPOLearner(space, BOX, ppo_config(**NORMALIZED, seed=9))
    other.load_state_dict(torch.load(file, weights_only=True))
    other.config = learner.config
    np.testing.assert_array_equal(learner.weights(), other.weights())
    policy.load_weights(learner.weights())
    for seed in range(2, 4):
        batch = make_batch(policy, seed, space=space)
        assert learner.update(batch) == other.update(batch)
        np.testing.assert_array_equal(learner.weights(), other.weights())
    with pytest.raises(CheckpointError, match=r"obs_moments, return_scale, optimizer of .*\. Got: .*Remedy"):
        learner.load_state_dict(PPOLearner(space, BOX, ppo_config()).state_dict())


def test_statistics_are_those_of_all_ranks() -> None:
    settings = {**NORMALIZED, "clip_reward": None}
    policy = Policy(PPOLearner(FAR, BOX, ppo_config(**settings)).module)
    batches = [make_batch(policy, seed, space=FAR, invalid=True) for seed in range(4)]

    def learn(bounds: list[int]) -> list[PPOLearner]:
        return learn_on_ranks(lambda: PPOLearner(FAR, BOX, ppo_config(**settings)), batches, bounds)[0]

    (alone,) = learn([0, N])
    state = alone.state_dict()
    for bounds in ([0, 1, N], [0, 0, 3, N]):
        ranks = learn(bounds)
        for rank in ranks:
            statistics = rank.state_dict()
            np.testing.assert_array_equal(rank.weights(), ranks[0].weights())
            np.testing.assert_allclose(rank.weights(), alone.weights(), atol=1e-5)
            for name in ("mean", "squares"):
                torch.testing.assert_close(statistics["obs_moments"][name], state["obs_moments"][name])
            torch.testing.assert_close(statistics["return_scale"]["returns"], state["return_scale"]["returns"])
