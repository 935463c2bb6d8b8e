"""gae, vtrace and n_step against their definitions: sums of discounted TD errors and rewards, written out."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.n_step import n_step
from helpers.vtrace import vtrace_by_definition
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from rayvec.learners.returns import gae, vtrace

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


# V-trace


def consistent(chunk: dict[str, Array]) -> dict[str, Array]:
    """The chunk with the value of the next observation, where the episode goes on, as the value of the next step."""
    within = ~(chunk["terminated"] | chunk["truncated"])[:-1] & chunk["valid"][1:]
    chunk["next_value"][:-1][within] = chunk["value"][1:][within]
    return chunk


@given(
    chunk=chunks(),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    rho_bar=st.floats(0.1, 3),
    c_bar=st.floats(0.1, 3),
    spread=st.sampled_from([0.0, 0.5, 3.0]),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_vtrace_equals_the_definition(
    chunk: dict[str, Array],
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
    spread: float,
    seed: int,
    dtype: type,
) -> None:
    consistent(chunk)
    for name in ("value", "next_value"):
        chunk[name] = chunk[name].astype(dtype)
    chunk["log_ratio"] = np.random.default_rng(seed).normal(scale=spread, size=chunk["rew"].shape).astype(dtype)
    coefficients = {"gamma": gamma, "lam": lam, "rho_bar": rho_bar, "c_bar": c_bar}
    got = vtrace(**chunk, **coefficients)
    for ours, expected in zip(got, vtrace_by_definition(**chunk, **coefficients), strict=True):
        assert ours.dtype == dtype
        tolerance = 1e-4 if dtype is np.float32 else 1e-12
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(ours / scale, expected / scale, atol=tolerance, rtol=0)


@given(chunk=chunks(), gamma=st.floats(0, 1))
def test_vtrace_on_policy_is_the_n_step_return(chunk: dict[str, Array], gamma: float) -> None:
    """Equation 2: with all importance weights 1 the target is the return to the end of the episode or chunk."""
    consistent(chunk)
    log_ratio = np.zeros(chunk["rew"].shape, np.float32)
    target, advantage = vtrace(**chunk, log_ratio=log_ratio, gamma=gamma)
    value = chunk.pop("value")
    returns = n_step(**chunk, gamma=gamma, num_steps=len(value))
    valid = chunk["valid"]
    np.testing.assert_allclose(target[valid], returns[valid], atol=1e-4, rtol=0)
    np.testing.assert_allclose(advantage[valid], (returns - value)[valid], atol=1e-4, rtol=0)


def test_vtrace_on_policy_is_also_gae() -> None:
    rng = np.random.default_rng(0)
    shape = (20, 3)
    ends = [rng.random(shape) < 0.1 for _ in range(2)]
    value, next_value = rng.normal(size=(2, *shape)).astype(np.float32)
    rew = rng.normal(size=shape)
    target, _ = vtrace(rew, value, next_value, np.zeros(shape), *ends, gamma=0.9, lam=0.7)
    np.testing.assert_allclose(target, gae(rew, value, next_value, *ends, gamma=0.9, lam=0.7)[1], atol=1e-5)


def test_vtrace_cuts_importance_weights_off() -> None:
    """Two steps whose ratios are 4 and 1/4, by hand."""
    rew, value = np.array([[1.0], [2.0]]), np.array([[3.0], [5.0]])
    next_value = np.array([[5.0], [7.0]])
    no = np.zeros((2, 1), bool)
    log_ratio = np.log([[4.0], [0.25]])
    target, advantage = vtrace(rew, value, next_value, log_ratio, no, no, gamma=0.5, rho_bar=2.0, c_bar=1.0)
    last = 5 + 0.25 * (2 + 0.5 * 7 - 5)
    first = 3 + 2 * (1 + 0.5 * 5 - 3) + 0.5 * 1 * 0.25 * (2 + 0.5 * 7 - 5)
    np.testing.assert_allclose(target, [[first], [last]])
    np.testing.assert_allclose(advantage, [[2 * (1 + 0.5 * last - 3)], [0.25 * (2 + 0.5 * 7 - 5)]])


def test_vtrace_takes_any_ratio() -> None:
    """Probabilities of the behaviour policy may be tiny, or those of the policy that learns."""
    ones, no = np.ones((2, 1), np.float32), np.zeros((2, 1), bool)
    target, advantage = vtrace(ones, ones, ones, np.array([[1000.0], [-1000.0]]), no, no, gamma=1.0)
    np.testing.assert_array_equal(target, [[2], [1]])
    np.testing.assert_array_equal(advantage, [[1], [0]])


def test_what_is_unknown_does_not_spread_in_vtrace() -> None:
    nan = np.float32(np.nan)
    rew = np.array([[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]])
    value = np.array([[0, 0], [0, nan], [0, 0]], np.float32)
    next_value = np.array([[0, 0], [nan, 8], [0, 0]], np.float32)
    next_value[0, 1] = 4
    log_ratio = np.where(np.isnan(value), nan, np.float32(0))
    terminated = np.array([[False, False], [True, False], [False, False]])
    valid = np.array([[True, True], [True, False], [True, True]])
    no = np.zeros_like(terminated)
    target, advantage = vtrace(rew, value, next_value, log_ratio, terminated, no, gamma=1, valid=valid)
    np.testing.assert_array_equal(target, [[2, 5], [1, np.nan], [1, 1]])
    np.testing.assert_array_equal(advantage, [[2, 5], [1, 0], [1, 1]])
    returns = n_step(rew, next_value, terminated, no, gamma=1, num_steps=3, valid=valid)
    np.testing.assert_array_equal(returns, [[2, 5], [1, 0], [1, 1]])


# n-step returns


@given(chunk=chunks(), gamma=st.floats(0, 1), num_steps=st.integers(1, 14))
def test_n_step_equals_the_definition(chunk: dict[str, Array], gamma: float, num_steps: int) -> None:
    del chunk["value"]
    got = n_step(**chunk, gamma=gamma, num_steps=num_steps)
    rew, terminated, truncated, valid = (chunk[name] for name in ("rew", "terminated", "truncated", "valid"))
    expected = np.zeros(rew.shape)
    for t, n in np.argwhere(valid).tolist():
        k = t
        while k < min(t + num_steps, len(rew)) and valid[k, n]:
            expected[t, n] += gamma ** (k - t) * rew[k, n]
            k += 1
            if terminated[k - 1, n] or truncated[k - 1, n]:
                break
        if not terminated[k - 1, n]:
            expected[t, n] += gamma ** (k - t) * chunk["next_value"][k - 1, n]
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


def test_vtrace_and_n_step_leave_their_arguments_alone() -> None:
    arrays = [np.ones((3, 2), np.float32) for _ in range(4)]
    flags = [np.zeros((3, 2), bool), np.zeros((3, 2), bool)]
    vtrace(*arrays, *flags, gamma=0.9)
    n_step(*arrays[:2], *flags, gamma=0.9, num_steps=2)
    for array in arrays:
        np.testing.assert_array_equal(array, 1)
    assert not np.any(flags)
