"""Noise is a function of (seed, environment, step, lane), and looks like noise."""

from __future__ import annotations

from math import erf, sqrt

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

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
