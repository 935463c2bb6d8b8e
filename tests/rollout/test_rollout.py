"""Topology changes speed only: chunks are the same wherever the policy sits, and they tell no lies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.chunks import assert_same_chunk
from helpers.exact import DriftEnv, SpaceEnv, TablePolicy
from helpers.kinds import ALL_SPACES
from helpers.simple_policies import Diarist
from helpers.testing import CountingEnv, FaultyEnv, assert_identical, counting_errors

from rayvec.data import Chunk, tree_map
from rayvec.errors import ConfigError
from rayvec.policies.noise import NO_NOISE, keyed_noise
from rayvec.vector.ray_vec_env import RayVecEnv

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "none": {"num_nodes": 0, "workers_per_node": 0},
    "none groups": {"num_nodes": 0, "workers_per_node": 0, "groups": 2},
    "workers groups": {"num_nodes": 0, "workers_per_node": 2, "groups": 2},
    "1x1": {"num_nodes": 1, "workers_per_node": 1},
    "1x2 groups": {"num_nodes": 1, "workers_per_node": 2, "groups": 2},
    "1x3 uneven": {"num_nodes": 1, "workers_per_node": 3},
    "2x1": {"num_nodes": 2, "workers_per_node": 1},
    "2x1 groups": {"num_nodes": 2, "workers_per_node": 1, "groups": 2},
}
NUM_ENVS, ZEROS = 5, np.zeros(2, int)
KINDS = ["image", "discrete", "tuple", "custom", "nested", "dict_of_text"]
IN_PROCESS_OR_WORKERS = ["none", "workers groups"]


def only_quick(*quick: str) -> list[Any]:
    """Every topology; those that are not named are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in TOPOLOGIES]


Make = Callable[..., RayVecEnv]


@pytest.fixture
def make(ray_cluster: object) -> Iterator[Make]:
    """Makes environments on a topology, and closes them after the test."""
    with ExitStack() as stack:
        yield lambda env_fns, topology, **kwargs: stack.enter_context(
            RayVecEnv(env_fns, **TOPOLOGIES[topology], **kwargs)
        )


@pytest.fixture(scope="module")
def shared(ray_cluster: object) -> Iterator[Make]:
    """Makes five environments of a class on a topology, once for all tests of this module, which reset them first."""
    with ExitStack() as stack:

        @cache
        def make(env_class: type[Any], topology: str) -> RayVecEnv:
            return stack.enter_context(RayVecEnv([env_class] * NUM_ENVS, **TOPOLOGIES[topology]))

        yield make


def here(env_fns: list[Any], **kwargs: Any) -> RayVecEnv:
    return RayVecEnv(env_fns, num_nodes=0, workers_per_node=0, **kwargs)


def serial_chunks(env: Any, policy: Any, lengths: list[int], seed: int) -> list[Chunk]:
    """What one process alone makes of the same environments."""
    with here([env] * NUM_ENVS) as envs:
        return [envs.rollout(policy, n, seed=None if number else seed) for number, n in enumerate(lengths)]


class TestTopologies:
    LENGTHS = (1, 33, 64)

    @pytest.mark.parametrize("inference", ["worker", "driver", "node"])
    @pytest.mark.parametrize("topology", only_quick("none groups", "1x1", "1x2 groups", "2x1"))
    def test_chunks_of_a_stochastic_environment(self, shared: Make, topology: str, inference: Any) -> None:
        policy = TablePolicy(num_states=50, seed=3)
        env = shared(DriftEnv, topology)
        seeds: list[Any] = [9, None, None]
        chunks = [env.rollout(policy, n, inference, seed) for n, seed in zip(self.LENGTHS, seeds, strict=True)]
        expected = serial_chunks(DriftEnv, policy, list(self.LENGTHS), 9)
        assert sum(len(chunk.final_index) for chunk in expected) >= 5
        for number, pair in enumerate(zip(chunks, expected, strict=True)):
            assert_same_chunk(*pair, where=f"chunk {number}")

    @pytest.mark.parametrize("inference", ["worker", "driver", "node"])
    @pytest.mark.parametrize("topology", only_quick("none", "none groups", "1x2 groups"))
    def test_chunks_tell_no_lies(self, shared: Make, topology: str, inference: Any) -> None:
        env = shared(CountingEnv, topology)
        chunks = [env.rollout(TablePolicy(), n, inference, seed) for n, seed in ((7, 2), (1, None), (40, None))]
        assert counting_errors(chunks) == []
        assert chunks[0].obs[0].tolist() == [[2 + i, 0, 0, 0] for i in range(NUM_ENVS)]
        for number, pair in enumerate(
            zip(chunks, serial_chunks(CountingEnv, TablePolicy(), [7, 1, 40], 2), strict=True)
        ):
            assert_same_chunk(*pair, where=f"chunk {number}")

    @pytest.mark.parametrize(
        ("kind", "topology"),
        [
            *product(KINDS, ["none"]),
            *(pytest.param(kind, "2x1", marks=pytest.mark.slow) for kind in ("nested", *KINDS[:4])),
        ],
    )
    def test_observations_of_any_kind(self, make: Make, kind: str, topology: str) -> None:
        def policy(obs: Any) -> Any:
            return np.zeros(NUM_ENVS if isinstance(obs, np.ndarray) and len(obs) == NUM_ENVS else count(obs), int)

        def count(obs: Any) -> int:
            while isinstance(obs, (dict, tuple)):
                obs = next(iter(obs.values() if isinstance(obs, dict) else obs))
            return len(obs)

        env_fn = partial(SpaceEnv, ALL_SPACES[kind])
        env = make([env_fn] * NUM_ENVS, topology=topology)
        expected = serial_chunks(env_fn, policy, [12], 4)[0]
        for inference in ("worker", "driver", "node"):
            assert_same_chunk(env.rollout(policy, 12, inference, seed=4), expected, inference)  # type: ignore[arg-type]

    @pytest.mark.parametrize("topology", IN_PROCESS_OR_WORKERS)
    def test_the_autoreset_mode_of_the_steps_does_not_matter(self, make: Make, topology: str) -> None:
        expected = None
        for mode in ("NextStep", "SameStep", "Disabled"):
            env = make([partial(CountingEnv, 1)] * 2, autoreset_mode=mode, topology=topology)
            env.reset(seed=0)
            env.step(np.zeros(2, int))
            chunk = env.rollout(TablePolicy(), 9)
            assert counting_errors([chunk]) == []
            assert chunk.obs[0, 0].tolist() == [0, 1, 0, 1]
            reset_infos = [info for info in chunk.reset_infos if info.t >= 0]
            expected = expected or (chunk.obs, reset_infos)
            assert_identical((chunk.obs, reset_infos), expected)
            env.reset(seed=0)
            assert env.step(np.zeros(2, int))[1].tolist() == [1.0, 1.0]


class TestChunk:
    @pytest.fixture
    def env(self) -> Iterator[RayVecEnv]:
        with here([CountingEnv] * 3, first_id=10) as env:
            env.reset(seed=10)
            yield env

    def test_infos_stand_where_they_were_said(self, env: RayVecEnv) -> None:
        chunk = env.rollout(lambda obs: np.zeros(len(obs), int), 30)
        said = {(info.t, info.n): info.info for info in chunk.infos}
        began = {(info.t, info.n): info.info for info in chunk.reset_infos}
        assert list(said) == sorted(said) and list(began) == sorted(began)
        for t, n in product(range(30), range(3)):
            total = int(chunk.obs[t, n, 3]) + 1
            assert said.get((t, n)) == ({"step": total} if total % 3 == 0 else None)
            episode = int(chunk.obs[t, n, 1])
            assert began.get((t, n)) == ({"began": episode + 1} if chunk.done[t, n] else None)
        assert chunk.env_ids.tolist() == [10, 11, 12]

    def test_the_reset_before_the_first_step_stands_at_minus_one(self) -> None:
        chunk = here([CountingEnv] * 3).rollout(lambda obs: np.zeros(len(obs), int), 1)
        before = [(info.t, info.n, info.info) for info in chunk.reset_infos if info.t < 0]
        assert before == [(-1, n, {"began": 0}) for n in range(3)]

    def test_a_chunk_is_in_memory_of_its_own(self, env: RayVecEnv) -> None:
        first = env.rollout(TablePolicy(), 5)
        kept = {field.name: getattr(first, field.name) for field in fields(first)}
        copies = {name: tree_map(np.copy, value) for name, value in kept.items() if isinstance(value, np.ndarray)}
        env.rollout(TablePolicy(), 20)
        for name, copy in copies.items():
            assert_identical(kept[name], copy, name)
            assert kept[name].flags.writeable

    def test_noise_is_that_of_seed_environment_and_step(self, env: RayVecEnv) -> None:
        policy = RecordsNoise()
        chunks = [env.rollout(policy, 4, seed=8), env.rollout(policy, 6)]
        expected = keyed_noise(policy.noise, seed=8, env_ids=np.array([10, 11, 12]), first_step=0, num_steps=10)
        assert_identical(np.concatenate([chunk.extras["noise"] for chunk in chunks]), expected[..., 0])


class RecordsNoise(TablePolicy):
    def act(self, obs: Any, noise: Any) -> Any:
        actions, _ = super().act(obs, noise)
        return actions, {"noise": noise[:, 0]}


class Returns:
    """A policy that returns the same things again and again, in turn."""

    noise = NO_NOISE

    def __init__(self, *results: Any) -> None:
        self._results = itertools.cycle(results)

    def act(self, obs: Any, noise: Any) -> Any:
        return next(self._results)

    def load_weights(self, weights: Any) -> None:
        raise NotImplementedError


class TestPolicies:
    def test_keys_of_actions_may_change_their_order(self) -> None:
        """The environment takes the action by key, and so does the chunk."""
        orders = itertools.cycle([("p", "q"), ("q", "p")])

        def policy(obs: Any) -> Any:
            return {key: np.full(2, " pq".index(key)) for key in next(orders)}

        action_space = spaces.Dict(p=spaces.Discrete(9), q=spaces.Discrete(9))
        with here([partial(SpaceEnv, spaces.Discrete(3), action_space)] * 2) as env:
            chunk = env.rollout(policy, 4, "driver")
        assert (chunk.act["p"] == 1).all() and (chunk.act["q"] == 2).all()

    def test_a_callable_may_return_a_tuple_for_arrays_and_lists_within_a_tuple(self) -> None:
        with here([CountingEnv] * 2) as env:
            assert_identical(env.rollout(lambda obs: (0, 1), 2).act, np.array([[0, 1]] * 2))
        pairs = spaces.Tuple([spaces.Discrete(9), spaces.Discrete(9)])
        with here([partial(SpaceEnv, spaces.Discrete(3), pairs)] * 3) as env:
            chunk = env.rollout(lambda obs: [[1, 2, 3], [4, 5, 6]], 2)
        assert_identical(chunk.act, (np.array([[1, 2, 3]] * 2), np.array([[4, 5, 6]] * 2)))

    def test_a_chunk_holds_what_was_returned_in_any_data_type(self) -> None:
        """A worker may get whole numbers from a policy where another gets fractions."""
        policy = Returns(
            (np.array([0, 1]), {"x": np.array([True, False]), "y": ["a", "b"]}),
            (np.array([0.5, 1]), {"x": np.array([7, 8]), "y": ["abc", "d"]}),
        )
        with here([CountingEnv] * 2) as env:
            chunk = env.rollout(policy, 2)
        assert_identical(chunk.act, np.array([[0, 1], [0.5, 1]]))
        assert_identical(chunk.extras, {"x": np.array([[1, 0], [7, 8]]), "y": np.array([["a", "b"], ["abc", "d"]])})

    @pytest.mark.parametrize(
        ("results", "words"),
        [
            *(((each, {}), "(?s)for 2 observations.*one action") for each in ([0], [0, 0, 0], 0, [[0], [0], [0]])),
            *((each, "must return") for each in (ZEROS, (ZEROS,), (ZEROS, ZEROS), [ZEROS, {}])),
            *(((ZEROS, each), "returned extras") for each in ({}, {"b": np.ones(2)}, {"a": np.ones((2, 1))})),
        ],
    )
    def test_wrong_results_are_refused(self, results: Any, words: str) -> None:
        policy = Returns((ZEROS, {"a": np.ones(2)}), results)
        with pytest.raises(ConfigError, match=words):
            here([CountingEnv] * 2).rollout(policy, 2)


class TestMemory:
    """A policy that remembers is told of every new episode, also of one that began before the chunk."""

    @pytest.mark.parametrize("topology", IN_PROCESS_OR_WORKERS)
    @pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
    @pytest.mark.parametrize("inference", ["worker", "driver", "node"])
    def test_across_steps_and_resets_in_between(self, make: Make, mode: str, inference: Any, topology: str) -> None:
        env, policy = make([CountingEnv] * NUM_ENVS, autoreset_mode=mode, topology=topology), Diarist()
        chunks = [env.rollout(policy, 9, inference, seed=1)]
        for _ in range(3):
            chunks.append(env.rollout(policy, 5, inference))
            env.reset(options={"reset_mask": np.array([True, False, True, False, True])})
            chunks.append(env.rollout(policy, 5, inference))
            env.step(np.zeros(NUM_ENVS, int))
            chunks.append(env.rollout(policy, 5, inference))
            env.reset()
        assert sum(len(chunk.final_index) for chunk in chunks) > 20
        assert not any(chunk.extras["mixed_up"].any() for chunk in chunks)

    @pytest.mark.parametrize(
        ("topology", "inference"),
        [
            ("none", "worker"),
            ("none", "driver"),
            ("1x1", "node"),
            *(pytest.param("1x1", inference, marks=pytest.mark.slow) for inference in ("worker", "driver")),
        ],
    )
    def test_after_restarts(self, make: Make, topology: str, inference: Any) -> None:
        env_fns = [CountingEnv, partial(FaultyEnv, "raise", "step", 4)]
        env = make(env_fns, on_env_error="restart", topology=topology)
        policy = Diarist()
        chunks = [env.rollout(policy, 3, inference, seed=seed) for seed in (1, None, None, None)]
        assert sum(len(chunk.restarts) for chunk in chunks) > 0
        assert not any(chunk.extras["mixed_up"].any() for chunk in chunks)
