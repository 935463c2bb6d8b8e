"""What IMPALA makes of chunks: older weights, several chunks, metrics; and V-trace of rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers.actor_critic_kit import BOX, DISCRETE, OBS, STATS, N, T, impala_config, make_batch, make_chunk, perturb
from helpers.paper_kit import PaperIMPALA
from helpers.vtrace import vtrace_by_definition

from rayvec.data import Batch
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.returns import num_rounds, vtrace_of_rows
from rayvec.policies.policy import Policy


def test_each_chunk_is_an_update() -> None:
    once, twice = (IMPALALearner(OBS, BOX, impala_config(learning_rate_schedule="constant")) for _ in range(2))
    first, second = (make_batch(Policy(once.module), seed).chunks[0] for seed in range(2))
    once.update(Batch((first,), STATS))
    once.update(Batch((second,), STATS))
    twice.update(Batch((first, second), STATS))
    np.testing.assert_array_equal(once.weights(), twice.weights())
    names = ("num_updates", "num_steps")
    assert [once.state_dict()[name] for name in names] == [twice.state_dict()[name] for name in names] == [2, 2 * T * N]


def test_a_longer_chunk_than_the_settings_name_is_summed_up_too() -> None:
    learner = IMPALALearner(OBS, DISCRETE, impala_config(num_steps=3))
    paper = PaperIMPALA(learner)
    for seed, num_steps in enumerate((3, 2 * T + 1)):
        chunk = make_chunk(Policy(learner.module), seed, num_steps=num_steps)
        learner.update(Batch((chunk,), STATS))
        paper.update(chunk)
    for ours, theirs in zip(learner.module.parameters(), paper.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_metrics_say_what_they_are() -> None:
    learner = IMPALALearner(OBS, DISCRETE, impala_config(num_minibatches=1))
    policy = Policy(copy.deepcopy(learner.module))
    [chunk] = (batch := make_batch(policy)).chunks
    on_policy = IMPALALearner(OBS, DISCRETE, impala_config(num_minibatches=1)).update(batch)
    assert on_policy["importance_weight"] == pytest.approx(1, abs=1e-6)
    assert on_policy["clip_fraction"] == 0 and on_policy["approx_kl"] == pytest.approx(0, abs=1e-6)
    perturb(learner.module, 0.3)
    paper = PaperIMPALA(learner)
    params, value, next_value = paper.outputs(chunk)
    logp, entropy = paper.logp_entropy(params, chunk)
    metrics = learner.update(batch)
    ratio = (logp - torch.from_numpy(chunk.extras["logp"])).exp().detach().numpy()
    assert 0.1 < metrics["clip_fraction"] < 0.9
    assert metrics["clip_fraction"] == pytest.approx((ratio > 1).mean())
    assert metrics["importance_weight"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(float(entropy.mean().detach()), rel=1e-5)
    ends = (chunk.terminated, chunk.truncated, chunk.valid)
    old = value.detach().numpy()
    target, _ = vtrace_by_definition(chunk.rew, old, next_value, np.log(ratio), *ends, 0.99, 1.0, 1.0, 1.0)
    assert metrics["value_loss"] == pytest.approx(0.5 * np.mean((old - target) ** 2), rel=1e-4)
    assert metrics["explained_variance"] == pytest.approx(1 - (target - old).var() / target.var(), rel=1e-4)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 64])
def test_vtrace_of_rows_equals_the_definition(num_steps: int) -> None:
    rng = np.random.default_rng(num_steps)
    shape = num_steps, N
    rew, value, next_value, log_ratio = rng.normal(size=(4, *shape))
    terminated, truncated = rng.random((2, *shape)) < 0.15
    valid = rng.random(shape) > 0.2
    terminated, truncated = terminated & valid, truncated & valid
    ends = terminated, truncated, valid
    within = ~(terminated | truncated)[:-1] & valid[1:]
    next_value[:-1][within] = value[1:][within]
    expected = vtrace_by_definition(rew, value, next_value, log_ratio, *ends, 0.9, 0.8, 1.2, 0.9)
    chain = ~(terminated | truncated)
    chain[:-1] &= valid[1:]
    chain[-1] = False
    columns = [rew, value, next_value, log_ratio, np.where(terminated, 0.0, 0.9), chain.astype(float)]
    rows = [torch.from_numpy(column.T[valid.T]) for column in columns]
    got = vtrace_of_rows(*rows, decay=0.9 * 0.8, rho_bar=1.2, c_bar=0.9, rounds=num_rounds(num_steps))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.T[valid.T], atol=1e-12)
