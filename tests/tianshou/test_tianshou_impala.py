"""rayvec.tianshou.IMPALA against the paper's sums, and on-policy against Tianshou's A2C."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import tianshou.data
import torch
from helpers import tianshou_algorithms as kit
from helpers.actor_critic_kit import perturb
from helpers.exact import DriftEnv
from helpers.paper_kit import vtrace_by_definition
from tianshou.algorithm import A2C
from tianshou.data import ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.torch_utils import policy_within_training_step
from torch.distributions import Distribution, Normal

from rayvec.tianshou import IMPALA

NUM_ENVS = 3


class Driven(DriftEnv):
    """Drifts by two continuous actions."""

    action_space = kit.BOX

    def step(self, action: Any) -> Any:
        return super().step(int(action.sum() > 0))


def apart(parameters: tuple[torch.Tensor, torch.Tensor]) -> Distribution:
    """A distribution whose log-probabilities come component by component."""
    return Normal(*parameters)


def make(kind: str = "discrete", cls: Any = IMPALA, **settings: Any) -> Any:
    torch.manual_seed(0)
    parts = kit.actor_critic(2, 2) if kind == "discrete" else kit.gaussian(apart if kind == "apart" else None, 2)
    return cls(**parts, optim=kit.adam(1e-2), gamma=0.9, **settings)


def filled(algorithm: Any, kind: str = "discrete", n_step: int = 90, buffer: Any = None) -> Any:
    """Returns a buffer with steps that the algorithm's policy has taken, collected by Tianshou."""
    env_class = DriftEnv if kind == "discrete" else Driven
    num_envs = NUM_ENVS if buffer is None else 1
    env = DummyVectorEnv([env_class] * num_envs)
    buffer = buffer or VectorReplayBuffer(20 * n_step, num_envs)
    collector = tianshou.data.Collector(algorithm, env, buffer)
    env.seed([5, 6, 7][:num_envs])
    collector.reset()
    with policy_within_training_step(algorithm.policy):
        collector.collect(n_step=n_step)
    return buffer


@pytest.mark.parametrize("kind", ["discrete", "joint", "apart"])
@pytest.mark.parametrize("single", [False, True], ids=["vector buffer", "single buffer"])
def test_targets_equal_the_paper(kind: str, single: bool) -> None:
    algorithm = make(kind, rho_bar=1.2, c_bar=0.9, vtrace_lambda=0.8)
    buffer = filled(algorithm, kind, buffer=ReplayBuffer(70) if single else None)  # which the single one overflows
    perturb(algorithm, 0.3)
    batch, indices = buffer.sample(0)
    with torch.no_grad():
        value, next_value = (algorithm.critic(obs).flatten().numpy() for obs in (batch.obs, batch.obs_next))
        dist = algorithm.policy(batch).dist
        logp = dist.log_prob(torch.as_tensor(batch.act)).reshape(len(batch), -1).sum(1).numpy()
    log_ratio = logp - np.asarray(batch.policy.logp)
    assert np.exp(log_ratio).max() > 1.2 and np.exp(log_ratio).min() < 0.9
    targets, advantages = np.zeros(len(batch)), np.zeros(len(batch))
    starts = [0, *(np.flatnonzero(np.diff(sub_of(buffer, indices))) + 1).tolist(), len(indices)]
    for start, stop in itertools.pairwise(starts):
        part = slice(start, stop)
        columns = [np.asarray(each)[part, None] for each in (batch.rew, value, next_value, log_ratio)]
        ends = [np.asarray(each)[part, None] for each in (batch.terminated, batch.truncated)]
        valid = np.ones_like(ends[0])
        target, advantage = vtrace_by_definition(*columns, *ends, valid, 0.9, 0.8, 1.2, 0.9)
        targets[part], advantages[part] = target[:, 0], advantage[:, 0]
    with policy_within_training_step(algorithm.policy):
        stats = algorithm.update(buffer, batch_size=None, repeat=1)
    assert stats.vf_loss.mean == pytest.approx(np.square(targets - value).mean(), rel=1e-4)
    assert stats.actor_loss.mean == pytest.approx(-(logp * advantages).mean(), rel=1e-4)
    assert stats.importance_weight == pytest.approx(np.exp(log_ratio).mean(), rel=1e-4)


def sub_of(buffer: Any, indices: Any) -> Any:
    """Returns which sub-buffer each index lies in."""
    if not hasattr(buffer, "buffers"):
        return np.zeros(len(indices), int)
    return indices // (buffer.maxsize // buffer.buffer_num)


@pytest.mark.parametrize("wrong", [{"rho_bar": -1.0}, {"c_bar": 0.0}, {"vtrace_lambda": 1.1}])
def test_what_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match=f"{next(iter(wrong))} .*should be"):
        make(**wrong)


@pytest.mark.parametrize("kind", ["discrete", "joint"])
def test_on_policy_an_update_is_that_of_a2c(kind: str) -> None:
    """With lambda 1 and importance weights 1 the paper's targets are n-step returns: A2C's, with GAE's lambda 1."""
    mine = make(kind, vf_coef=0.7, ent_coef=0.02, max_grad_norm=0.5)
    other = make(kind, A2C, vf_coef=0.7, ent_coef=0.02, max_grad_norm=0.5, gae_lambda=1.0)
    other.load_state_dict(copy.deepcopy(mine.state_dict()))
    buffer = filled(mine, kind)
    stats = []
    for algorithm in (mine, other):
        with policy_within_training_step(algorithm.policy):
            stats.append(algorithm.update(buffer, batch_size=None, repeat=1))
    for ours, theirs in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert stats[0].importance_weight == pytest.approx(1, abs=1e-5)
    assert stats[0].loss.mean == pytest.approx(stats[1].loss.mean, abs=1e-4)
    assert stats[0].gradient_steps == 1
    assert set(stats[0].get_loss_stats_dict()) >= {"importance_weight", "rho_clip_fraction", "loss"}
