"""gae against its definition: sums of discounted TD errors, written out."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, strategies as st
from numpy.typing import NDArray

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
