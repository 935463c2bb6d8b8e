"""PPO on several ranks gives the weights that it gives on one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from thread_ranks import Apart, ThreadRanks, on_ranks
from torch import Tensor

from rayvec.config import PPOConfig
from rayvec.errors import ConfigError
from rayvec.learners.ppo import PPOLearner
from rayvec.nets import ActorCritic, make_actor_critic
from rayvec.noise import keyed_noise
from rayvec.policies import Policy
from rayvec.types import Batch, Chunk, CollectStats

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE, BOX = spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)
NUM_UPDATES = 20
T, N = 8, 7
STATS = CollectStats(np.zeros(0), np.zeros(0, np.int64), T * N, 0, 0, 1.0, 1.0, {}, (0, 0))


class DoubleActorCritic(ActorCritic):
    """An actor-critic that computes in float64."""

    def encode(self, obs: Any) -> Tensor:
        return torch.from_numpy(self.encoder(obs))


def make_learner(action_space: spaces.Space[Any], dtype: torch.dtype, **settings: Any) -> PPOLearner:
    usual = {"num_envs": N, "num_steps": T, "minibatch_size": 16, "num_epochs": 2, "learning_rate": 1e-3}
    config = PPOConfig(**{"total_steps": 2 * NUM_UPDATES * T * N, "entropy_coef": 0.01, "seed": 5, **usual, **settings})
    module = make_actor_critic(OBS, action_space, (16, 16), seed=1)
    if dtype == torch.float64:
        encoder = module.encoder
        module.double().__class__ = DoubleActorCritic
        module.encoder = lambda obs: encoder(obs).astype(np.float64)  # type: ignore[assignment]
    return PPOLearner(OBS, action_space, config, module=module)


def make_batches(action_space: spaces.Space[Any], count: int) -> list[Batch]:
    """Batches of two chunks each, with episodes that end in both ways and steps that did not happen."""
    policy = Policy(make_actor_critic(OBS, action_space, (16, 16), seed=1))
    return [Batch((make_chunk(policy, 2 * seed), make_chunk(policy, 2 * seed + 1)), STATS) for seed in range(count)]


def make_chunk(policy: Policy, seed: int) -> Chunk:
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(T + 1, N, 3)).astype(np.float32)
    noise = keyed_noise(policy.noise, seed=seed, env_ids=np.arange(N), first_step=0, num_steps=T)
    steps = [policy.act(obs[t], noise[t]) for t in range(T)]
    valid = rng.random((T, N)) > 0.1
    terminated, truncated = (rng.random((2, T, N)) < 0.15) & valid
    final_index = np.argwhere(terminated | truncated)
    return Chunk(
        env_ids=np.arange(N),
        obs=obs[:-1],
        act=np.stack([act for act, _ in steps]),
        rew=rng.normal(size=(T, N)),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        last_obs=obs[-1],
        final_index=final_index,
        final_obs=rng.normal(size=(len(final_index), 3)).astype(np.float32),
        extras={name: np.stack([extras[name] for _, extras in steps]) for name in steps[0][1]},
    )


def learn(
    bounds: list[int],
    action_space: spaces.Space[Any],
    dtype: torch.dtype,
    num_updates: int = NUM_UPDATES,
    kind: type[ThreadRanks] = ThreadRanks,
    **settings: Any,
) -> tuple[list[Tensor], list[list[dict[str, float]]]]:
    """Learns on ranks that have the columns between `bounds`; returns each rank's parameters and metrics."""
    batches = make_batches(action_space, num_updates)

    def work(ranks: ThreadRanks) -> tuple[Tensor, list[dict[str, float]]]:
        learner = make_learner(action_space, dtype, **settings)
        learner.ranks = ranks
        start, stop = bounds[ranks.rank : ranks.rank + 2]
        shards = [Batch(tuple(chunk.columns(start, stop) for chunk in batch.chunks), STATS) for batch in batches]
        metrics = [learner.update(shard) for shard in shards]
        return learner.state_dict()["parameters"], metrics

    parameters, metrics = zip(*on_ranks(len(bounds) - 1, work, kind), strict=True)
    return list(parameters), list(metrics)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


@pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_ranks_together_equal_one(action_space: spaces.Space[Any], dtype: torch.dtype, tolerance: float) -> None:
    """Even, uneven and empty shards."""
    (expected,), (expected_metrics,) = learn([0, N], action_space, dtype)
    start = make_learner(action_space, dtype).state_dict()["parameters"]
    assert distance(start, expected) > 0.01
    for bounds in ([0, 3, N], [0, 6, N], [0, 2, 4, N], [0, 0, N], [0, 1, 4, 4, N]):
        parameters, metrics = learn(bounds, action_space, dtype)
        assert distance(parameters[0], expected) <= tolerance, bounds
        assert all(torch.equal(each, parameters[0]) for each in parameters), bounds
        assert all(each == metrics[0] for each in metrics), bounds
        for ours, theirs in zip(metrics[0], expected_metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), bounds


@pytest.mark.parametrize("settings", [{"target_kl": 1e-3}, {"normalize_advantage": False}, {"clip_value_loss": True}])
def test_variants_equal_one(settings: dict[str, Any]) -> None:
    (expected,), _ = learn([0, N], DISCRETE, torch.float64, 5, **settings)
    parameters, _ = learn([0, 2, N], DISCRETE, torch.float64, 5, **settings)
    assert distance(parameters[0], expected) <= 1e-12
    assert torch.equal(*parameters)


def test_without_sums_they_differ() -> None:
    """What the tests above show comes from the sums."""
    (expected,), _ = learn([0, N], DISCRETE, torch.float64, 1)
    parameters, _ = learn([0, 3, N], DISCRETE, torch.float64, 1, kind=Apart)
    assert distance(parameters[0], expected) > 1e-3
    assert not torch.equal(*parameters)


def test_more_ranks_than_minibatch_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 2 ranks, as minibatch_size. Got: 3 ranks"):
        learn([0, *itertools.repeat(N, 3)], DISCRETE, torch.float32, 1, minibatch_size=2)
