"""Noise is a function of (seed, environment, step, lane) and looks like noise; the squashed normal distribution."""

from __future__ import annotations

from math import erf, sqrt

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from rayvec.policies.distributions import make_tanh_gaussian
from rayvec.policies.noise import NoiseSpec, keyed_noise

UNIFORM, NORMAL = NoiseSpec("uniform", 3), NoiseSpec("normal", 3)
SPECS = pytest.mark.parametrize("spec", [UNIFORM, NORMAL], ids=lambda spec: spec.kind)


def noise(spec: NoiseSpec, seed: int = 0, num_envs: int = 64, num_steps: int = 512) -> NDArray[np.float64]:
    return keyed_noise(spec, seed=seed, env_ids=np.arange(num_envs), first_step=0, num_steps=num_steps)


@SPECS
@given(data=st.data())
def test_a_part_equals_that_part_of_the_whole(spec: NoiseSpec, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**64 - 1))
    whole = noise(spec, seed, num_envs=9, num_steps=12)
    env_ids = np.array(data.draw(st.lists(st.integers(0, 8), min_size=1, unique=True)))
    first = data.draw(st.integers(0, 11))
    count = data.draw(st.integers(0, 12 - first))
    part = keyed_noise(spec, seed=seed, env_ids=env_ids, first_step=first, num_steps=count)
    assert part.dtype == np.float64
    np.testing.assert_array_equal(part, whole[first : first + count, env_ids])


def test_uniform_lies_in_the_open_interval_and_is_uniform() -> None:
    u = noise(UNIFORM).ravel()
    assert u.min() > 0 and u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    expected = u.size / 100
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 55 < chi_square < 155  # 99 degrees of freedom: 99 plus or minus four standard deviations
    assert abs(u.mean() - 1 / 2) < 4 * sqrt(1 / 12 / u.size)
    assert abs(u.var() - 1 / 12) < 4 * sqrt(1 / 180 / u.size)


def test_normal_has_the_moments_and_the_quantiles_of_a_normal() -> None:
    z = noise(NORMAL).ravel()
    assert np.isfinite(z).all()
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - moment) < 4 * sqrt(variance / z.size)
    for quantile in (-2.5, -1.0, -0.1, 0.5, 1.5, 3.0):
        probability = (1 + erf(quantile / sqrt(2))) / 2
        assert abs((z < quantile).mean() - probability) < 4 * sqrt(probability * (1 - probability) / z.size)


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
