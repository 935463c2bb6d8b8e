"""gae against its definition, which samples a minibatch has, and moments of samples spread over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.thread_ranks import ThreadRanks, on_ranks
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from torch import Tensor

from rayvec.learners.ranks import ALONE, global_moments, stratified_shuffle
from rayvec.learners.returns import gae

Array = NDArray[Any]


def gae_by_definition(
    rew: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    lam: float,
) -> Array:
    """Equation 16 of Schulman et al. (2016), one sum for each step of each environment, in double precision."""
    num_steps, num_envs = rew.shape
    advantage = np.zeros(rew.shape)
    for n in range(num_envs):
        for t in range(num_steps):
            for k in range(t, num_steps):
                if not valid[k, n]:
                    break
                bootstrap = 0.0 if terminated[k, n] else float(next_value[k, n])
                td_error = float(rew[k, n]) + gamma * bootstrap - float(value[k, n])
                advantage[t, n] += (gamma * lam) ** (k - t) * td_error
                if terminated[k, n] or truncated[k, n]:
                    break
    return advantage


@st.composite
def chunks(draw: st.DrawFn) -> dict[str, Array]:
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rates = [draw(st.sampled_from([0.0, 0.2, 1.0])) for _ in range(3)]
    return {
        "rew": rng.normal(size=shape),
        "value": rng.normal(size=shape).astype(np.float32),
        "next_value": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < rates[0],
        "truncated": rng.random(shape) < rates[1],
        "valid": rng.random(shape) >= 0.5 * rates[2],
    }


@given(chunk=chunks(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_equals_the_definition(chunk: dict[str, Array], gamma: float, lam: float) -> None:
    advantage, target = gae(**chunk, gamma=gamma, lam=lam)
    expected = gae_by_definition(**chunk, gamma=gamma, lam=lam)
    assert advantage.dtype == target.dtype == np.float32
    np.testing.assert_allclose(advantage, expected, atol=2e-5, rtol=0)
    np.testing.assert_allclose(target, expected + chunk["value"], atol=2e-5, rtol=0)


@given(count=st.integers(0, 400), num_minibatches=st.integers(1, 300), seed=st.integers(0, 9))
def test_every_number_is_in_one_minibatch_and_every_stratum_in_all(count: int, num_minibatches: int, seed: int) -> None:
    shuffled = stratified_shuffle(count, num_minibatches, np.random.default_rng(seed))
    assert len(shuffled) == num_minibatches and all(np.array_equal(numbers, np.sort(numbers)) for numbers in shuffled)
    assert sorted(np.concatenate(shuffled).tolist()) == list(range(count))
    for numbers in shuffled:
        strata = (numbers // num_minibatches).tolist()
        full = count // num_minibatches
        assert strata[:full] == list(range(full)) and strata[full:] in ([], [full])


@given(
    bounds=st.tuples(st.integers(0, 400), st.integers(0, 400)), num_minibatches=st.integers(1, 50), seed=st.integers(0)
)
def test_a_range_of_numbers_has_as_much_of_each_minibatch(
    bounds: tuple[int, int], num_minibatches: int, seed: int
) -> None:
    first, last = sorted(bounds)
    shuffled = stratified_shuffle(400, num_minibatches, np.random.default_rng(seed))
    shares = [int(((numbers >= first) & (numbers < last)).sum()) for numbers in shuffled]
    assert max(shares) - min(shares) <= 2
    assert max(shares) <= (last - first) / num_minibatches + 2


@pytest.mark.parametrize("shift", [0.0, 1e6, 1e8])
def test_moments_keep_their_digits_where_the_mean_is_large(shift: float) -> None:
    """One rank has a few values near the minimum, one has none, and one has the others."""
    generator = torch.Generator().manual_seed(0)
    centred = torch.randn(1, 5000, generator=generator, dtype=torch.float64).sort().values
    values, bounds = centred[0] + shift, [0, 7, 7, 5000]

    def moments(ranks: ThreadRanks) -> tuple[Tensor, Tensor]:
        own = values[bounds[ranks.rank] : bounds[ranks.rank + 1]]
        return global_moments(ranks, own[None], [len(own)])

    first, *others = on_ranks(3, moments)
    alone = global_moments(ALONE, values[None], [5000])
    rounding = 1e-15 * max(1.0, shift)  # of the values themselves
    for mean, variance in (first, alone):
        torch.testing.assert_close(mean - shift, centred.mean(1), rtol=0.0, atol=2 * rounding)
        torch.testing.assert_close(variance, centred.var(1, correction=0), rtol=10 * rounding, atol=0.0)
    assert all(torch.equal(other[0], first[0]) and torch.equal(other[1], first[1]) for other in others)
