"""Policies with a hidden state: they act as the network computes, also from states that callers keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import BOX, DISCRETE, MIXED, OBS, SIGHT, draw_obs, perturb
from torch import nn

from rayvec.errors import ConfigError
from rayvec.policies.noise import keyed_noise
from rayvec.policies.policy import Policy
from rayvec.policies.recurrent import RecurrentActorCritic

CELLS = pytest.mark.parametrize("kind", ["gru", "lstm"])
K = 3


def make(
    kind: Any = "gru", obs: spaces.Space[Any] = OBS, act: spaces.Space[Any] = DISCRETE, **kwargs: Any
) -> RecurrentActorCritic:
    return RecurrentActorCritic(obs, act, (8,), kind=kind, recurrent_size=6, **kwargs)


def noise_of(policy: Policy, num_steps: int, count: int = K) -> Any:
    return keyed_noise(policy.noise, seed=1, env_ids=np.arange(count), first_step=0, num_steps=num_steps)


@CELLS
def test_the_cell_is_that_of_torch(kind: str) -> None:
    module = make(kind)
    perturb(module, 0.5)
    cell, theirs = module.cell, (nn.GRU if kind == "gru" else nn.LSTM)(8, 6)
    with torch.no_grad():
        for ours, name in ((cell.inputs, "ih"), (cell.recurrent, "hh")):
            getattr(theirs, f"weight_{name}_l0").copy_(ours.weight)
            getattr(theirs, f"bias_{name}_l0").copy_(ours.bias)
        features = torch.randn(9, K, 8, generator=torch.Generator().manual_seed(0))
        states = cell(features, torch.zeros(K, cell.state_size), torch.zeros(9, K, dtype=torch.bool))
        torch.testing.assert_close(states[..., :6], theirs(features)[0], atol=1e-6, rtol=1e-5)


@CELLS
@pytest.mark.parametrize("space", [OBS, SIGHT, MIXED], ids=["numbers", "image", "both"])
@pytest.mark.parametrize("act", [DISCRETE, pytest.param(BOX, marks=pytest.mark.slow)], ids=["discrete", "box"])
def test_the_actor_computes_what_the_network_does(kind: str, space: Any, act: Any) -> None:
    module = make(kind, space, act, normalize_obs=True)
    perturb(module, 0.1)
    if module.obs_mean is not None:
        module.obs_mean.fill_(0.5)
    actor = module.make_actor()
    state, expected = actor.initial_state(K), torch.zeros(K, module.cell.state_size)
    assert state.shape == expected.shape
    rng = np.random.default_rng(0)
    for _ in range(4):
        obs = draw_obs(space, rng, K)
        params, state = actor.step(obs, state)
        with torch.no_grad():
            expected = module.next_state(module.encode(obs), expected)
            torch.testing.assert_close(torch.from_numpy(params), module.heads(expected)[0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(torch.from_numpy(state), expected, atol=2e-6, rtol=1e-5)


@CELLS
def test_episodes_begin_where_the_caller_says(kind: str) -> None:
    policy = Policy(make(kind))
    rng = np.random.default_rng(0)
    observations, noise = [draw_obs(OBS, rng, K) for _ in range(3)], noise_of(policy, 3)
    policy.act(observations[0], noise[0])
    policy.begin_episodes(np.array([1]))
    state = policy.state_to_record(0, K)
    assert state is not None and not state[1].any() and state[0].any() and state[2].any()
    assert policy.state_to_record(3, K) is None and policy.state_to_record(16, K) is not None
    got = policy.act(observations[1], noise[1])[1]["logp"]
    fresh = Policy(make(kind)).act(observations[1], noise[1])[1]["logp"]
    assert got[1] == pytest.approx(fresh[1], abs=1e-6) and got[0] != fresh[0]
    policy.begin_episodes(np.arange(5))  # those of other environments, more of them
    wide = draw_obs(OBS, rng, 5)
    np.testing.assert_array_equal(
        policy.act(wide, noise_of(policy, 1, 5)[0])[1]["logp"],
        Policy(make(kind)).act(wide, noise_of(policy, 1, 5)[0])[1]["logp"],
    )


@CELLS
@pytest.mark.parametrize("act", [DISCRETE, BOX], ids=["discrete", "box"])
def test_states_that_the_caller_keeps(kind: str, act: Any) -> None:
    """Acting from explicit states gives what the policy gives with its own, and leaves those alone."""
    policy, other = Policy(make(kind, act=act)), Policy(make(kind, act=act))
    state = policy.initial_state(K)
    assert state is not None and state.shape == (K, 6 if kind == "gru" else 12) and not state.any()
    noise = noise_of(policy, 4)
    for obs, numbers in zip(draw_obs(OBS, np.random.default_rng(0), 4, K), noise, strict=True):
        before = state.copy()
        actions, extras, following = policy.act_from(obs, numbers, state)
        assert following is not None
        np.testing.assert_array_equal(state, before)
        expected, expected_extras = other.act(obs, numbers)
        np.testing.assert_array_equal(actions, expected)
        np.testing.assert_array_equal(extras["logp"], expected_extras["logp"])
        state = following
    kept = policy.state_to_record(0, K)
    assert kept is not None and not kept.any()
    for wrong in (None, state[:2], state[:, :3]):
        with pytest.raises(ConfigError, match="hidden state is"):
            policy.act_from(obs, numbers, wrong)
