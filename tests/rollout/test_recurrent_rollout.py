"""The hidden state of an environment depends on its own history only, in any topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from helpers.exact import DriftEnv

from rayvec.collect.collector import Collector
from rayvec.data import Chunk
from rayvec.policies.policy import Policy
from rayvec.policies.recurrent import RecurrentActorCritic
from rayvec.vector.ray_vec_env import RayVecEnv

N, LENGTH = 5, 6
HERE: dict[str, Any] = {"num_nodes": 0, "workers_per_node": 0}
WORKERS: dict[str, Any] = {"num_nodes": 0, "workers_per_node": 2}
TOPOLOGIES = {
    "here": HERE,
    "groups": {**HERE, "groups": 2},
    "workers": WORKERS,
    "worker": {**HERE, "workers_per_node": 1},
}
Make = Callable[..., RayVecEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes environments, and closes them after the test."""
    with ExitStack() as stack:
        yield lambda env_fns, **kwargs: stack.enter_context(RayVecEnv(env_fns, **kwargs))


def make_module(kind: Any = "gru", seed: int = 0) -> RecurrentActorCritic:
    module = RecurrentActorCritic(
        DriftEnv.observation_space, DriftEnv.action_space, (8,), kind=kind, recurrent_size=8,
        sequence_length=LENGTH, seed=seed,
    )  # fmt: skip
    for parameter in module.parameters():
        parameter.data.mul_(1.5)
    return module


def assert_states_follow(module: RecurrentActorCritic, chunks: Sequence[Chunk]) -> int:
    """Replays every environment alone; returns how many episodes ended. All begin an episode with the first chunk."""
    actor = module.make_actor()
    count = 0
    for n in range(N):
        state = actor.initial_state(1)
        for chunk in chunks:
            starts = list(range(0, chunk.num_steps, LENGTH))
            assert len(chunk.states) == len(starts)
            for t in range(chunk.num_steps):
                if t in starts:
                    np.testing.assert_allclose(chunk.states[starts.index(t), n], state[0], atol=2e-6)
                params, state = actor.step(chunk.obs[t, n][None], state)
                if chunk.valid[t, n]:
                    chosen = params[0] - np.log(np.exp(params[0]).sum())
                    assert chunk.extras["logp"][t, n] == pytest.approx(chosen[chunk.act[t, n]], abs=5e-6)
                if chunk.done[t, n] or not chunk.valid[t, n]:
                    state[:] = 0
                    count += 1
    return count


@pytest.mark.parametrize("inference", ["worker", "driver"])
@pytest.mark.parametrize("kind", ["gru", pytest.param("lstm", marks=pytest.mark.slow)])
def test_topology_changes_nothing(make: Make, inference: Any, kind: str) -> None:
    module = make_module(kind)
    results = {}
    for name, topology in TOPOLOGIES.items():
        env = make([DriftEnv] * N, **topology)
        collector = Collector(env, Policy(module), inference=inference, seed=3)
        results[name] = [collector.collect(n_step=N * count).chunks[0] for count in (1, 13, 64)]
    assert assert_states_follow(module, results["here"]) > 5
    for chunks in results.values():
        for chunk, expected in zip(chunks, results["here"], strict=True):
            for column in ("obs", "act", "rew", "terminated", "truncated"):
                np.testing.assert_array_equal(getattr(chunk, column), getattr(expected, column))
            np.testing.assert_allclose(chunk.states, expected.states, atol=1e-6)
            np.testing.assert_allclose(chunk.extras["logp"], expected.extras["logp"], atol=2e-6)


@pytest.mark.parametrize("inference", ["worker", "driver"])
def test_states_outlive_new_weights_and_end_with_the_episode(make: Make, inference: Any) -> None:
    env = make([DriftEnv] * N, **WORKERS)
    module, other = make_module(), make_module(seed=1)
    collector = Collector(env, Policy(module), inference=inference, seed=3)
    first = collector.collect(n_step=N * 8).chunks[0]
    weights = np.concatenate([parameter.detach().numpy().ravel() for parameter in other.parameters()])
    collector.set_weights(weights)
    second = collector.collect(n_step=N * 8).chunks[0]
    running = np.flatnonzero(~first.done[-1])
    assert np.abs(second.states[0, running]).min(0).max() > 0
    actor = module.make_actor()
    for n in running.tolist():
        began = int(np.flatnonzero([True, *first.done[:, n]])[-1])
        state = actor.initial_state(1)
        for t in range(began, 8):
            state = actor.step(first.obs[t, n][None], state)[1]
        np.testing.assert_allclose(second.states[0, n], state[0], atol=2e-6)

    collector.reset(seed=9)
    assert not collector.collect(n_step=N * 8).chunks[0].states[0].any(), "new episodes everywhere"
    policy = Policy(module)
    env.rollout(policy, 3, inference)
    env.reset(options={"reset_mask": np.arange(N) == 2})
    states = env.rollout(policy, 3, inference).states[0]
    assert not states[2].any() and states.any()


def test_chunks_that_are_collected_ahead_continue_from_the_state_before(make: Make) -> None:
    env = make([DriftEnv] * N, **WORKERS)
    collector = Collector(env, Policy(make_module()), prefetch=True, seed=3)
    chunks = [collector.collect(n_step=N * 9).chunks[0] for _ in range(4)]
    assert_states_follow(make_module(), chunks)
