"""IMPALA against a slow reference: the paper's sums, torch.distributions, autograd and per-tensor optimizers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import (
    BOX,
    DISCRETE,
    OBS,
    SPACES,
    STATS,
    N,
    T,
    distribution_of,
    flat_gradient,
    impala_config,
    make_batch,
    perturb,
)
from helpers.vtrace import vtrace_by_definition
from numpy.typing import NDArray
from torch import Tensor, nn

from rayvec.collect.collector import EpisodeTracker
from rayvec.config import IMPALAConfig
from rayvec.data import Batch, Chunk
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError
from rayvec.learners.impala import IMPALALearner, Minibatch, _fields
from rayvec.learners.minibatches import stratified_shuffle
from rayvec.policies.networks import ActorCritic, make_actor_critic
from rayvec.policies.policy import Policy
from rayvec.pools.step_and_autoreset import SerialPool
from rayvec.rollout.loop import rollout
from rayvec.training.runs import torch_threads


def double(module: ActorCritic) -> ActorCritic:
    """The same net in float64."""
    encode = module.encoder

    class Double(type(module)):  # type: ignore[misc]
        def encode(self, obs: Any) -> Tensor:
            return torch.from_numpy(encode(obs).astype(np.float64))

    module = copy.deepcopy(module).double()
    module.__class__ = Double
    return module


class Reference:
    """IMPALA as the paper tells it, on one chunk, in the dtype of the module."""

    def __init__(self, module: ActorCritic, config: IMPALAConfig) -> None:
        self.module, self.config = copy.deepcopy(module), config
        make = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[config.optimizer]
        self.optimizer = make(
            self.module.parameters(), lr=config.learning_rate, eps=config.optimizer_eps, foreach=False
        )
        self.num_updates = self.num_steps = 0

    def loss(self, chunk: Chunk, columns: NDArray[np.int64]) -> Tensor:
        config, valid = self.config, chunk.valid[:, columns]
        dtype = next(self.module.parameters()).dtype
        obs, next_obs = (torch.from_numpy(each[:, columns]).to(dtype) for each in (chunk.obs, chunk.next_obs()))
        act = chunk.extras["raw_act"] if "raw_act" in chunk.extras else chunk.act - DISCRETE.start
        distribution = distribution_of(self.module, obs)
        logp = distribution.log_prob(torch.from_numpy(np.nan_to_num(act[:, columns])))
        value, next_value = self.module.critic(obs)[..., 0], self.module.critic(next_obs)[..., 0]
        target, advantage = vtrace_by_definition(
            chunk.rew[:, columns],
            value.detach().numpy(),
            next_value.detach().numpy(),
            np.where(valid, logp.detach().numpy() - chunk.extras["logp"][:, columns], 0),
            chunk.terminated[:, columns],
            chunk.truncated[:, columns],
            valid,
            config.gamma,
            config.vtrace_lambda,
            config.rho_bar,
            config.c_bar,
        )
        error = value - torch.from_numpy(target).to(dtype)
        policy_loss = -logp * torch.from_numpy(advantage).to(dtype)
        every = policy_loss + config.value_coef * 0.5 * error**2 - config.entropy_coef * distribution.entropy()
        return every[torch.from_numpy(valid)].mean()

    def update(self, chunk: Chunk) -> None:
        config = self.config
        self.optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - self.num_steps / config.total_steps)
        generator = np.random.default_rng([config.seed, self.num_updates])
        for columns in stratified_shuffle(N, config.num_minibatches, generator):
            self.optimizer.zero_grad()
            torch.autograd.backward(self.loss(chunk, columns))
            nn.utils.clip_grad_norm_(self.module.parameters(), config.max_grad_norm)
            self.optimizer.step()
        self.num_updates += 1
        self.num_steps += int(chunk.valid.sum())


@SPACES
@pytest.mark.parametrize("invalid", [False, True], ids=["all valid", "some invalid"])
@pytest.mark.parametrize("settings", [{}, {"vtrace_lambda": 0.7, "rho_bar": 1.3, "c_bar": 0.9}], ids=["plain", "cut"])
def test_gradient_equals_the_reference(
    action_space: spaces.Space[Any], invalid: bool, settings: dict[str, float]
) -> None:
    config = impala_config(num_minibatches=1, **settings)
    module = make_actor_critic(OBS, action_space, (8,), seed=3)
    batch = make_batch(Policy(module), invalid=invalid)
    perturb(module, 0.2)  # so that importance weights leave 1
    learner = IMPALALearner(OBS, action_space, config, module=double(module))
    reference = Reference(learner.module, config)
    [chunk] = batch.chunks
    torch.autograd.backward(reference.loss(chunk, np.arange(N)))
    count = int(chunk.valid.sum())
    trajectories = learner._trajectories(chunk)
    learner._gradients(_fields(trajectories), *learner._rows(trajectories, Minibatch(np.arange(N), count)))
    torch.testing.assert_close(flat_gradient(learner.module), flat_gradient(reference.module), atol=1e-12, rtol=1e-9)


@SPACES
@pytest.mark.parametrize("invalid", [False, True], ids=["all valid", "some invalid"])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_updates_equal_the_reference(action_space: spaces.Space[Any], invalid: bool, optimizer: Any) -> None:
    """Three updates, each from steps of the weights before the last two."""
    config = impala_config(optimizer=optimizer)
    module = make_actor_critic(OBS, action_space, (8,), seed=3)
    policy = Policy(module)
    learner = IMPALALearner(OBS, action_space, config, module=double(module))
    reference = Reference(learner.module, config)
    start = learner.weights()
    weights = [start, start]
    for seed in range(3):
        policy.load_weights(weights[-2])
        batch = make_batch(policy, seed, invalid=invalid)
        if invalid:
            for column in (batch.chunks[0].rew, batch.chunks[0].extras["logp"]):
                column[~batch.chunks[0].valid] = np.nan
        learner.update(batch)
        reference.update(batch.chunks[0])
        weights.append(learner.weights())
    for ours, theirs in zip(learner.module.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    assert np.abs(learner.weights() - start).max() > 0.02


def test_older_weights_are_corrected_for() -> None:
    """Steps of other weights with their own logp, and with the learner's, make different gradients."""
    learner = IMPALALearner(OBS, DISCRETE, impala_config(num_minibatches=1))
    batch = make_batch(Policy(learner.module))
    [chunk] = batch.chunks
    on_policy = learner.update(batch)
    assert on_policy["importance_weight"] == pytest.approx(1, abs=1e-6)
    assert on_policy["clip_fraction"] == 0 and on_policy["approx_kl"] == pytest.approx(0, abs=1e-6)
    perturb(learner.module, 0.3)
    gradients = []
    for logp in (chunk.extras["logp"], chunk.extras["logp"] - 1):
        chunk.extras["logp"] = logp
        trajectories = learner._trajectories(chunk)
        learner._gradients(_fields(trajectories), *learner._rows(trajectories, Minibatch(np.arange(N), T * N)))
        gradients.append(flat_gradient(learner.module).clone())
    assert not torch.allclose(*gradients, rtol=0.1)


def test_each_chunk_is_an_update() -> None:
    once, twice = (IMPALALearner(OBS, BOX, impala_config()) for _ in range(2))
    policy = Policy(once.module)
    first, second = (make_batch(policy, seed).chunks[0] for seed in range(2))
    once.update(Batch((first,), STATS))
    once.update(Batch((second,), STATS))
    once._begin_update()
    learner_rate = impala_config().learning_rate
    twice.update(Batch((first, second), STATS))
    assert once._num_updates == twice._num_updates == 2
    assert learner_rate > once._optimizer.param_groups[0]["lr"]
    assert once._num_steps == twice._num_steps == 2 * T * N


def test_metrics_say_what_they_are() -> None:
    learner = IMPALALearner(OBS, DISCRETE, impala_config(num_minibatches=1))
    module = copy.deepcopy(learner.module)
    policy = Policy(module)
    perturb(learner.module, 0.3)
    batch = make_batch(policy)
    [chunk] = batch.chunks
    reference = copy.deepcopy(learner.module)
    metrics = learner.update(batch)
    distribution = distribution_of(reference, torch.from_numpy(chunk.obs))
    logp = distribution.log_prob(torch.from_numpy(chunk.act - DISCRETE.start))
    ratio = (logp - torch.from_numpy(chunk.extras["logp"])).exp().detach().numpy()
    assert 0.1 < metrics["clip_fraction"] < 0.9
    assert metrics["clip_fraction"] == pytest.approx((ratio > 1).mean())
    assert metrics["importance_weight"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(float(distribution.entropy().mean().detach()), rel=1e-5)
    value, next_value = (
        reference.critic(torch.from_numpy(obs))[..., 0].detach().numpy() for obs in (chunk.obs, chunk.next_obs())
    )
    ends = (chunk.terminated, chunk.truncated, chunk.valid)
    target, _ = vtrace_by_definition(chunk.rew, value, next_value, np.log(ratio), *ends, 0.99, 1.0, 1.0, 1.0)
    assert metrics["value_loss"] == pytest.approx(0.5 * np.mean((value - target) ** 2), rel=1e-4)
    assert metrics["explained_variance"] == pytest.approx(1 - (target - value).var() / target.var(), rel=1e-4)


@pytest.mark.parametrize(("variance", "explained"), [(6e-8, 0.0), (8.1e-7, 0.5)], ids=["rounding", "small"])
def test_a_variance_of_rounding_is_none(variance: float, explained: float) -> None:
    """The targets have a mean of 100, and this variance as a share of the mean's square."""
    learner = IMPALALearner(OBS, DISCRETE, impala_config())
    moments = [100.0, 1e4 * (1 + variance), 1.0, 1.0 + 0.5e4 * variance]
    stats = torch.tensor([64.0, *[0.0] * 6, *moments, 0.0], dtype=torch.float64)
    assert learner._metrics([stats])["explained_variance"] == pytest.approx(explained)


def test_rewards_are_scaled_and_cut_off() -> None:
    learner = IMPALALearner(OBS, DISCRETE, impala_config(normalize_reward=True, clip_reward=0.05))
    [chunk] = make_batch(Policy(learner.module)).chunks
    before = chunk.rew.copy()
    scaled = IMPALALearner(OBS, DISCRETE, impala_config(normalize_reward=True))._trajectories(chunk).steps.rew
    ratio = float(scaled[0]) / before.flat[0]
    assert ratio != 1
    np.testing.assert_allclose(scaled, ratio * before.ravel(), rtol=1e-6)
    np.testing.assert_allclose(learner._trajectories(chunk).steps.rew, scaled.clip(-0.05, 0.05), rtol=1e-6)
    np.testing.assert_array_equal(chunk.rew, before)


def test_more_minibatches_than_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_minibatches at most num_envs = 4"):
        impala_config(num_minibatches=5)


@pytest.mark.slow
def test_it_learns_from_steps_of_older_weights() -> None:
    """CartPole, two updates behind all the time."""
    with torch_threads(1):
        returns, divergences = learn_behind(IMPALAConfig(total_steps=120_000, seed=1), lag=2)
    assert np.concatenate(returns[:10]).mean() < 50
    assert np.concatenate(returns[-40:]).mean() > 150
    assert max(divergences) > 1e-4


def learn_behind(config: IMPALAConfig, lag: int) -> tuple[list[NDArray[np.float64]], list[float]]:
    """Learns from steps of weights that are `lag` updates old; returns each iteration's returns and ``approx_kl``."""
    ids = np.arange(config.num_envs)
    pool = SerialPool(EnvFactory.build("CartPole-v1", config.num_envs))
    pool.reset(ids, ids.tolist())
    pool.recv(ids)
    spaces_of = pool.spaces
    learner = IMPALALearner(spaces_of.observation, spaces_of.action, config)
    policy, tracker = Policy(learner.module), EpisodeTracker(config.num_envs)
    weights, returns, divergences = [learner.weights()] * (lag + 1), [], []
    for iteration in range(config.num_iterations):
        policy.load_weights(weights[-1 - lag])
        chunk = rollout(pool, policy, config.num_steps, noise_seed=1, first_step=iteration * config.num_steps)
        returns.append(tracker.add(chunk)[0].returns)
        divergences.append(learner.update(Batch((chunk,), STATS))["approx_kl"])
        weights.append(learner.weights())
    return returns, divergences
