"""What PPO makes of batches: chunks that follow each other, restarts, statistics, images and metrics."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import BOX, DISCRETE, FAR, MIXED, OBS, STATS, N, T, make_batch, make_chunk, ppo_config
from helpers.thread_ranks import learn_on_ranks
from numpy.typing import NDArray

from rayvec.data import Batch, Chunk
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.policy import Policy

NORMALIZED = {"normalize_obs": True, "normalize_reward": True, "clip_reward": 0.5}


def learned(*chunks: Chunk, space: spaces.Space[Any] = OBS, **settings: Any) -> NDArray[np.float32]:
    """Returns the weights after one batch of chunks, of which the second half is learned from as one minibatch."""
    learner = PPOLearner(space, DISCRETE, ppo_config(**settings))
    learner.update(Batch(chunks, STATS))
    return learner.weights()


def chunks_of(count: int, **kwargs: Any) -> list[Chunk]:
    policy = Policy(PPOLearner(kwargs.get("space", OBS), DISCRETE, ppo_config()).module)
    return [make_chunk(policy, seed, **kwargs) for seed in range(count)]


def part(chunk: Chunk, start: int, stop: int) -> Chunk:
    is_in = (chunk.final_index[:, 0] >= start) & (chunk.final_index[:, 0] < stop)
    names = ("obs", "act", "rew", "terminated", "truncated", "valid")
    return replace(
        chunk,
        **{name: getattr(chunk, name)[start:stop] for name in names},
        last_obs=chunk.last_obs if stop == chunk.num_steps else chunk.obs[stop],
        final_index=chunk.final_index[is_in] - np.array([start, 0]),
        final_obs=chunk.final_obs[is_in],
        extras={"logp": chunk.extras["logp"][start:stop]},
    )


def test_two_chunks_equal_one_of_both_lengths() -> None:
    """Advantages run on from one chunk into the next."""
    [whole] = chunks_of(1)
    parts = [part(whole, 0, T // 2), part(whole, T // 2, T)]
    np.testing.assert_allclose(learned(*parts), learned(whole), atol=1e-5)
    assert np.abs(learned(*reversed(parts)) - learned(whole)).max() > 1e-3


def test_advantages_end_where_an_environment_restarts() -> None:
    """Between two chunks, where no step says that the episode ended: it was truncated at the last observation."""
    none = {"terminated": np.zeros((T, N), bool), "truncated": np.zeros((T, N), bool)}
    first, second = (
        replace(chunk, **none, final_index=np.zeros((0, 2), np.int64), final_obs=chunk.final_obs[:0])
        for chunk in chunks_of(2)
    )
    first, truncated = replace(first, last_obs=second.obs[0]), none["truncated"].copy()
    truncated[-1, 1] = True
    ended = replace(first, truncated=truncated, final_index=np.array([[T - 1, 1]]), final_obs=second.obs[:1, 1])
    anew = replace(second, restarts=np.array([[-1, 1], [3, 2]]))
    got = learned(first, anew)
    np.testing.assert_allclose(got, learned(ended, second), atol=1e-5)
    assert np.abs(got - learned(first, second)).max() > 1e-3
    np.testing.assert_array_equal(learned(anew), learned(second))  # what was before is not in this batch


def test_a_target_kl_ends_the_epochs() -> None:
    chunks = chunks_of(1)
    np.testing.assert_array_equal(learned(*chunks, target_kl=1e-9), learned(*chunks, num_epochs=1))
    np.testing.assert_array_equal(learned(*chunks, target_kl=1e9), learned(*chunks))
    assert (learned(*chunks, num_epochs=1) != learned(*chunks)).any()


def test_metrics_say_what_they_are() -> None:
    learner = PPOLearner(OBS, DISCRETE, ppo_config(num_epochs=1, minibatch_size=T * N, gae_lambda=1.0, gamma=0.0))
    [chunk] = chunks_of(1)
    value = learner.module.value(torch.from_numpy(chunk.obs)).detach().numpy()
    metrics = learner.update(Batch((chunk,), STATS))
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["entropy"] == pytest.approx(np.log(3), abs=1e-3)
    assert metrics["policy_loss"] == pytest.approx(0, abs=1e-5)  # normalised advantages, all ratios 1
    error = chunk.rew - value  # without a future, the reward is the target
    assert metrics["value_loss"] == pytest.approx(0.5 * np.square(error).mean(), rel=1e-5)
    assert metrics["explained_variance"] == pytest.approx(1 - error.var() / chunk.rew.var(), rel=1e-4)


def test_observations_are_normalised_by_all_that_was_seen_before() -> None:
    learner = PPOLearner(MIXED, DISCRETE, ppo_config(normalize_obs=True))
    policy = Policy(learner.module)
    seen = []
    for seed in range(3):
        batch = make_batch(policy, seed, space=MIXED, invalid=True)
        chunk = batch.chunks[0]
        numbers, raw = learner.module.encode(chunk.obs)[0].numpy(), chunk.obs["touch"]
        if seen:
            before = np.concatenate(seen).astype(np.float64)
            raw = (raw - before.mean(0)) / before.std(0)
        np.testing.assert_allclose(numbers, raw.clip(-10, 10), atol=1e-5)
        seen.append(chunk.obs["touch"][chunk.valid])
        learner.update(batch)


def test_rewards_are_scaled_by_the_spread_of_discounted_returns_and_clipped() -> None:
    settings = {"gamma": 0.9, "clip_reward": 0.7}
    learner, plain = (PPOLearner(OBS, DISCRETE, ppo_config(**settings, normalize_reward=n)) for n in (True, False))
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
        scaled.chunks[0].rew[:] = (chunk.rew / np.std(returns)).clip(-0.7, 0.7)
        learner.update(batch)
        plain.update(scaled)
        np.testing.assert_allclose(learner.weights(), plain.weights(), atol=2e-5)


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
