"""What IMPALA makes of chunks: older weights, several chunks, metrics; and V-trace of rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers.actor_critic_kit import BOX, DISCRETE, OBS, STATS, N, T, impala_config, make_batch, make_chunk, perturb
from helpers.paper_kit import PaperIMPALA, vtrace_by_definition

from rayvec.data import Batch
from rayvec.learners.impala import IMPALALearner
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
