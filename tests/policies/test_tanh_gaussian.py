"""The squashed normal distribution against torch.distributions."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces

from rayvec.policies.distributions import make_tanh_gaussian
from rayvec.policies.noise import keyed_noise

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 0.5], np.float32))
PARAMS = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
NOISE = keyed_noise(make_tanh_gaussian(BOX).noise, seed=0, env_ids=np.arange(500), first_step=0, num_steps=1)[0]


def test_log_probabilities_equal_those_of_torch() -> None:
    distribution = make_tanh_gaussian(BOX)
    sample, acting_logp = distribution.sample(PARAMS, NOISE)
    mean, raw = torch.from_numpy(PARAMS).double().chunk(2, -1)
    normal = torch.distributions.Normal(mean, (-5 + 3.5 * (raw.tanh() + 1)).exp())
    x = normal.mean + normal.stddev * torch.from_numpy(NOISE)
    np.testing.assert_allclose(sample, x.tanh(), atol=1e-6)
    exact = normal.log_prob(x) - (1 - x.tanh().square()).log()
    inner = (x.abs() < 4).all(1).numpy()  # further out, 1 - tanh^2 cancels in the reference
    np.testing.assert_allclose(acting_logp[inner], exact.sum(-1)[inner], atol=1e-4)


def test_actions_fill_the_bounds_and_lead_back_to_the_samples() -> None:
    distribution = make_tanh_gaussian(BOX)
    for sample, _ in (distribution.sample(PARAMS, NOISE), distribution.mode(PARAMS), distribution.uniform(NOISE)):
        actions = distribution.action(sample)
        assert actions.dtype == np.float32 and all(BOX.contains(action) for action in actions)
        np.testing.assert_allclose(distribution.recorded(actions, {}), sample, atol=1e-6)
    np.testing.assert_allclose(distribution.mode(PARAMS)[0], np.tanh(PARAMS[:, :2]), atol=1e-6)
    extremes = distribution.action(np.array([[-1.0, -1.0], [1.0, 1.0]], np.float32))
    np.testing.assert_array_equal(extremes, np.stack([BOX.low, BOX.high]))


def test_far_out_nothing_is_infinite() -> None:
    params = np.array([[300.0, -300.0, 5.0, -5.0]], np.float32)
    sample, logp = make_tanh_gaussian(BOX).sample(params, np.zeros((1, 2)))
    assert np.isfinite(sample).all() and np.isfinite(logp).all()
