"""PPO against a slow reference in the words of torch.distributions, autograd and per-tensor Adam."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import (
    DISCRETE,
    MIXED,
    OBS,
    SIGHT,
    SPACES,
    STATS,
    N,
    T,
    distribution_of,
    flat_gradient,
    make_batch,
    make_chunk,
    perturb,
    ppo_config,
)
from torch import Tensor, nn

from rayvec.config import PPOConfig
from rayvec.data import Batch, Chunk
from rayvec.learners.minibatches import stratified_shuffle
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.returns import gae
from rayvec.policies.networks import ActorCritic
from rayvec.policies.policy import Policy


class Reference:
    """PPO as the paper and the blog post tell it, step by step, on the valid steps of one chunk."""

    def __init__(self, module: ActorCritic, config: PPOConfig) -> None:
        self.module, self.config = copy.deepcopy(module), config
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=config.learning_rate, eps=1e-5, foreach=False)
        self.num_updates = self.num_steps = 0

    def rows(self, chunk: Chunk) -> dict[str, Tensor]:
        obs, next_obs = torch.from_numpy(chunk.obs), torch.from_numpy(chunk.next_obs())
        with torch.no_grad():
            value, next_value = self.module.critic(obs)[..., 0], self.module.critic(next_obs)[..., 0]
        advantage, target = gae(
            chunk.rew,
            value.numpy(),
            next_value.numpy(),
            chunk.terminated,
            chunk.truncated,
            gamma=self.config.gamma,
            lam=self.config.gae_lambda,
            valid=chunk.valid,
        )
        act = chunk.extras["raw_act"] if "raw_act" in chunk.extras else chunk.act - DISCRETE.start
        columns = {"obs": chunk.obs, "act": act, "logp": chunk.extras["logp"], "value": value.numpy()}
        columns |= {"advantage": advantage, "target": target}
        by_env = {name: column.swapaxes(0, 1)[chunk.valid.T] for name, column in columns.items()}
        return {name: torch.from_numpy(column) for name, column in by_env.items()}

    def loss(self, rows: dict[str, Tensor]) -> Tensor:
        config = self.config
        distribution = distribution_of(self.module, rows["obs"])
        ratio = torch.exp(distribution.log_prob(rows["act"]) - rows["logp"])
        advantage: Tensor = rows["advantage"]
        if config.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        surrogate = torch.min(
            ratio * advantage, torch.clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef) * advantage
        )
        value = self.module.critic(rows["obs"])[:, 0]
        error = (value - rows["target"]) ** 2
        if config.clip_value_loss:
            near = torch.clip(value, rows["value"] - config.clip_coef, rows["value"] + config.clip_coef)
            error = torch.max(error, (near - rows["target"]) ** 2)
        entropy = distribution.entropy().mean()
        loss: Tensor = -surrogate.mean() + config.value_coef * 0.5 * error.mean() - config.entropy_coef * entropy
        return loss

    def update(self, chunk: Chunk) -> None:
        rows, config = self.rows(chunk), self.config
        count = len(rows["logp"])
        left = 1 - self.num_steps / config.total_steps
        self.optimizer.param_groups[0]["lr"] = config.learning_rate * left
        generator = np.random.default_rng([config.seed, self.num_updates])
        for _ in range(config.num_epochs):
            for index in stratified_shuffle(count, round(count / config.minibatch_size), generator):
                self.optimizer.zero_grad()
                torch.autograd.backward(self.loss({name: column[index] for name, column in rows.items()}))
                nn.utils.clip_grad_norm_(self.module.parameters(), config.max_grad_norm)
                self.optimizer.step()
        self.num_updates += 1
        self.num_steps += count


@SPACES
@pytest.mark.parametrize("clip_value_loss", [False, True])
@pytest.mark.parametrize("normalize_advantage", [False, True])
def test_gradient_equals_the_reference(
    action_space: spaces.Space[Any], clip_value_loss: bool, normalize_advantage: bool
) -> None:
    config = ppo_config(
        minibatch_size=T * N,
        clip_value_loss=clip_value_loss,
        normalize_advantage=normalize_advantage,
        entropy_coef=0.1,
        clip_coef=0.1,
    )
    learner = PPOLearner(OBS, action_space, config)
    batch = make_batch(Policy(learner.module))
    rows = learner._samples(batch)
    learner._begin_update()
    perturb(learner.module, 0.2)  # so that ratios leave 1 and some are clipped
    reference = Reference(learner.module, config)
    columns = dict(zip(("obs", "act", "logp", "value", "advantage", "target"), rows, strict=True))
    if action_space is DISCRETE:
        columns["act"] = columns["act"][:, 0]
    torch.autograd.backward(reference.loss(columns))
    total = len(rows.logp)
    [[minibatch], *_], _ = learner._draw(rows, [], range(total), total, np.random.default_rng(0))
    stats = learner._gradients(tuple(rows), *minibatch.rows)
    assert 0.1 < float(stats[4]) < 0.9
    torch.testing.assert_close(flat_gradient(learner.module), flat_gradient(reference.module), atol=2e-6, rtol=2e-5)


@SPACES
@pytest.mark.parametrize("invalid", [False, True], ids=["all valid", "some invalid"])
def test_updates_equal_the_reference(action_space: spaces.Space[Any], invalid: bool) -> None:
    config = ppo_config(entropy_coef=0.01)
    learner = PPOLearner(OBS, action_space, config)
    reference = Reference(learner.module, config)
    policy = Policy(learner.module)
    start = learner.weights()
    for seed in range(3):
        batch = make_batch(policy, seed, invalid=invalid)
        if invalid:
            for column in (batch.chunks[0].rew, batch.chunks[0].extras["logp"]):
                column[~batch.chunks[0].valid] = np.nan
        learner.update(batch)
        reference.update(batch.chunks[0])
        policy.load_weights(learner.weights())
    for ours, theirs in zip(learner.module.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert np.abs(learner.weights() - start).max() > 0.05


def test_two_chunks_equal_one_of_both_lengths() -> None:
    """Advantages run on from one chunk into the next."""
    learner = PPOLearner(OBS, DISCRETE, ppo_config())
    whole = make_chunk(Policy(learner.module), 0)
    half = T // 2
    in_first = whole.final_index[:, 0] < half
    parts = []
    for part, finals in ((slice(0, half), in_first), (slice(half, T), ~in_first)):
        parts.append(
            Chunk(
                env_ids=whole.env_ids,
                **{
                    name: getattr(whole, name)[part]
                    for name in ("obs", "act", "rew", "terminated", "truncated", "valid")
                },
                last_obs=whole.obs[half] if part.start == 0 else whole.last_obs,
                final_index=whole.final_index[finals] - np.array([part.start, 0]),
                final_obs=whole.final_obs[finals],
                extras={"logp": whole.extras["logp"][part]},
            )
        )
    joined, expected = learner._samples(Batch(tuple(parts), STATS)), learner._samples(Batch((whole,), STATS))
    for ours, theirs in zip(joined, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_a_target_kl_ends_the_epochs() -> None:
    def learned(**settings: Any) -> np.ndarray[Any, Any]:
        learner = PPOLearner(OBS, DISCRETE, ppo_config(**settings))
        learner.update(make_batch(Policy(learner.module)))
        return learner.weights()

    np.testing.assert_array_equal(learned(target_kl=1e-9), learned(num_epochs=1))
    np.testing.assert_array_equal(learned(target_kl=1e9), learned())
    assert (learned(num_epochs=1) != learned()).any()


def test_metrics_say_what_they_are() -> None:
    learner = PPOLearner(OBS, DISCRETE, ppo_config(num_epochs=1, minibatch_size=T * N, learning_rate=1e-9))
    batch = make_batch(Policy(learner.module))
    rows = learner._samples(batch)
    metrics = learner.update(batch)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["entropy"] == pytest.approx(np.log(3), abs=1e-3)
    assert metrics["policy_loss"] == pytest.approx(0, abs=1e-5)  # normalised advantages, all ratios 1
    assert metrics["value_loss"] == pytest.approx(0.5 * float((rows.value - rows.target).square().mean()), rel=1e-5)
    error = (rows.target - rows.value).numpy()
    assert metrics["explained_variance"] == pytest.approx(1 - error.var() / rows.target.numpy().var(), rel=1e-4)


@pytest.mark.parametrize("space", [SIGHT, MIXED], ids=["image", "image and numbers"])
def test_images_are_learned_from(space: spaces.Space[Any]) -> None:
    """Rows hold the bytes themselves, values are those of each observation, and the actor's net learns."""
    learner = PPOLearner(space, DISCRETE, ppo_config(num_epochs=1, normalize_obs=True))
    batch = make_batch(Policy(learner.module), space=space, invalid=True)
    chunk = batch.chunks[0]
    rows = learner._samples(batch)
    images = rows.obs if space is SIGHT else rows.obs[1]
    sight = chunk.obs if space is SIGHT else chunk.obs["sight"]
    assert images.dtype == torch.uint8
    np.testing.assert_array_equal(images, sight.swapaxes(0, 1)[chunk.valid.T])
    with torch.no_grad():
        torch.testing.assert_close(rows.value, learner.module.value(rows.obs), atol=1e-6, rtol=1e-5)
    before = [parameter.detach().clone() for parameter in learner.module.parameters()]
    learner.update(batch)
    assert all((old != new).any() for old, new in zip(before, learner.module.parameters(), strict=True))


def test_values_of_many_images_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = PPOLearner(SIGHT, DISCRETE, ppo_config())
    batch = make_batch(Policy(learner.module), space=SIGHT)
    whole = learner._samples(batch)
    monkeypatch.setattr("rayvec.learners.ppo._ROWS_AT_ONCE", 7)
    for ours, theirs in zip(learner._samples(batch), whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_advantages_end_where_an_environment_restarts() -> None:
    """Between two chunks, where no step says that the episode ended; the value there is bootstrapped all the same."""
    learner = PPOLearner(OBS, DISCRETE, ppo_config(gamma=0.9, gae_lambda=0.8))
    policy = Policy(learner.module)
    whole = [make_chunk(policy, seed) for seed in range(2)]
    none = {"terminated": np.zeros((T, N), bool), "truncated": np.zeros((T, N), bool)}
    first, second = (
        replace(chunk, **none, final_index=np.zeros((0, 2), np.int64), final_obs=chunk.final_obs[:0]) for chunk in whole
    )
    anew = replace(second, restarts=np.array([[-1, 1], [3, 2]]))

    def advantages(*chunks: Chunk) -> Tensor:
        rows = [len(chunk.rew) for chunk in chunks]
        return learner._samples(Batch(chunks, STATS)).advantage.reshape(N, sum(rows))

    alone, through, cut = advantages(first), advantages(first, second), advantages(first, anew)
    torch.testing.assert_close(cut[1, :T], alone[1])
    others = [0, 2, 3]
    torch.testing.assert_close(cut[others], through[others], atol=0, rtol=0)
    torch.testing.assert_close(cut[:, T:], through[:, T:], atol=0, rtol=0)
    assert (through[1, T - 1] - alone[1, -1]).abs() > 1e-3
    torch.testing.assert_close(advantages(anew)[1], advantages(second)[1])  # what was before is not in this batch


def test_no_trace_comes_out_of_steps_beyond_the_quota() -> None:
    """In batches of episodes everything after the last counted step of an environment is not valid."""
    learner = PPOLearner(OBS, DISCRETE, ppo_config())
    chunk = make_chunk(Policy(learner.module), 0)
    valid = np.ones((T, N), bool)
    valid[5:, 1], valid[0:, 2] = False, False
    rows = learner._samples(Batch((replace(chunk, valid=valid),), STATS))
    surplus = replace(chunk, valid=valid, rew=np.where(valid, chunk.rew, 1e6))
    same = learner._samples(Batch((surplus,), STATS))
    assert len(same.logp) == valid.sum()
    assert torch.equal(same.advantage, rows.advantage) and torch.equal(same.target, rows.target)
