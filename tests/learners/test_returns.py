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


@given(chunk=chunks(), gamma=st.floats(0, 1))
def test_lambda_0_is_the_td_error_and_lambda_1_the_return(chunk: dict[str, Array], gamma: float) -> None:
    chunk["valid"][:] = True
    within = ~(chunk["terminated"] | chunk["truncated"])[:-1]
    chunk["next_value"][:-1][within] = chunk["value"][1:][within]
    bootstrap = np.where(chunk["terminated"], 0, chunk["next_value"])
    _, one_step = gae(**chunk, gamma=gamma, lam=0)
    np.testing.assert_allclose(one_step, chunk["rew"] + gamma * bootstrap, atol=1e-5, rtol=0)

    _, full = gae(**chunk, gamma=gamma, lam=1)
    following = chunk["next_value"][-1]
    for t in reversed(range(len(full))):
        ended = chunk["truncated"][t] | chunk["terminated"][t]
        following = chunk["rew"][t] + gamma * np.where(ended, bootstrap[t], following)
        np.testing.assert_allclose(full[t], following, atol=5e-5, rtol=0)


def test_truncation_bootstraps_and_termination_does_not() -> None:
    rew, value, next_value = np.array([[1.0]]), np.zeros((1, 1), np.float32), np.full((1, 1), 10, np.float32)
    yes, no = np.array([[True]]), np.array([[False]])
    _, target = gae(rew, value, next_value, no, yes, gamma=0.5, lam=0.9)
    assert target == 6
    _, target = gae(rew, value, next_value, yes, no, gamma=0.5, lam=0.9)
    assert target == 1
    _, target = gae(rew, value, next_value, yes, yes, gamma=0.5, lam=0.9)
    assert target == 1


def test_what_is_unknown_does_not_spread() -> None:
    """The value after a termination, and everything about a step that did not happen, may be NaN."""
    nan = np.float32(np.nan)
    rew = np.array([[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]])
    value = np.array([[0, 0], [0, nan], [0, 0]], np.float32)
    next_value = np.array([[0, 0], [nan, nan], [0, 0]], np.float32)
    terminated = np.array([[False, False], [True, False], [False, False]])
    truncated = np.array([[False, True], [False, False], [False, False]])
    valid = np.array([[True, True], [True, False], [True, True]])
    advantage, _ = gae(rew, value, next_value, terminated, truncated, gamma=1, lam=1, valid=valid)
    np.testing.assert_array_equal(advantage, [[2, 1], [1, 0], [1, 1]])


def test_leaves_its_arguments_alone() -> None:
    arrays = [np.ones((3, 2)), np.ones((3, 2), np.float32), np.ones((3, 2), np.float32), *np.zeros((2, 3, 2), bool)]
    before = [array.copy() for array in arrays]
    gae(*arrays, gamma=0.9, lam=0.9)
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy)
