"""How environments are made: from what, how many, with which seeds."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from helpers.exact import SpaceEnv
from hypothesis import given
from hypothesis import strategies as st

from rayvec.envs.factory import EnvFactory, env_seeds
from rayvec.errors import ConfigError
from rayvec.testing import CountingEnv


class TestSeeds:
    @given(seed=st.integers(0, 2**40), num_envs=st.integers(1, 20), cut=st.integers(0, 20))
    def test_a_slice_has_the_seeds_it_has_in_the_whole(self, seed: int, num_envs: int, cut: int) -> None:
        cut = min(cut, num_envs)
        whole = env_seeds(seed, num_envs)
        assert whole == [seed + i for i in range(num_envs)]
        assert env_seeds(seed, num_envs - cut, first=cut) == whole[cut:]

    def test_lists_and_nothing(self) -> None:
        assert env_seeds(None, 2) == [None, None]
        assert env_seeds([3, None, np.int64(5)], 3) == [3, None, 5]
        assert all(type(seed) is int for seed in env_seeds(np.arange(3), 3))  # type: ignore[arg-type]

    @pytest.mark.parametrize("seeds", [[], [1], [1, 2, 3]])
    def test_a_wrong_number_is_explained(self, seeds: list[int | None]) -> None:
        with pytest.raises(ValueError, match=r"Expected: 2 seeds\. Got: .* Remedy: "):
            env_seeds(seeds, 2)

    def test_they_are_those_of_gymnasium(self) -> None:
        sync = SyncVectorEnv([partial(SpaceEnv, spaces.Discrete(2))] * 3)
        sync.reset(seed=40)
        assert list(sync.np_random_seed) == env_seeds(40, 3)
        sync.close()


class TestFactory:
    def test_from_an_id(self) -> None:
        factory = EnvFactory.build("CartPole-v1", 3, {"max_episode_steps": 9})
        env = factory.make(2)
        assert factory.num_envs == 3 and factory.spec is not None and factory.spec.id == "CartPole-v1"
        assert env.spec is not None and env.spec.max_episode_steps == 9
        assert EnvFactory.build("CartPole-v1").num_envs == 1

    def test_from_a_spec_with_wrappers_in_order(self) -> None:
        wrappers = [partial(gymnasium.wrappers.TimeLimit, max_episode_steps=4), gymnasium.wrappers.FlattenObservation]
        env = EnvFactory.build(gymnasium.spec("Blackjack-v1"), 2, wrappers=wrappers).make(0)
        assert type(env) is gymnasium.wrappers.FlattenObservation
        assert type(env.env) is gymnasium.wrappers.TimeLimit

    def test_from_callables_with_wrappers(self) -> None:
        factory = EnvFactory.build(
            [CountingEnv, partial(CountingEnv, 3)],
            wrappers=[partial(gymnasium.wrappers.TimeLimit, max_episode_steps=4)],
        )
        assert factory.num_envs == 2 and factory.spec is None
        assert [type(factory.make(i)) for i in range(2)] == [gymnasium.wrappers.TimeLimit] * 2
        assert factory.make(1).unwrapped._max == 3  # type: ignore[attr-defined]

    def test_any_iterable_of_callables(self) -> None:
        assert EnvFactory.build(CountingEnv for _ in range(4)).num_envs == 4  # type: ignore[arg-type]

    def test_a_part_makes_its_own(self) -> None:
        factory = EnvFactory.build([partial(CountingEnv, i + 1) for i in range(5)])
        part = factory.part(range(2, 4))
        assert [part.make(i).unwrapped._max for i in range(part.num_envs)] == [3, 4]  # type: ignore[attr-defined]

    def test_it_travels_with_functions_of_any_place(self) -> None:
        size = 6
        factory = EnvFactory.build([lambda: SpaceEnv(spaces.Discrete(size))])
        again: EnvFactory = pickle.loads(factory.to_bytes())
        assert again.make(0).observation_space == spaces.Discrete(6)

    def test_it_takes_registrations_to_a_process_that_has_none(self) -> None:
        gymnasium.register("rayvec-tests/Carried-v3", entry_point=lambda size: SpaceEnv(spaces.Discrete(size)))
        try:
            data = EnvFactory.build("rayvec-tests/Carried-v3", 1, {"size": 4}).to_bytes()
        finally:
            del gymnasium.registry["rayvec-tests/Carried-v3"]
        code = (
            "import pickle, sys, gymnasium; factory = pickle.loads(sys.stdin.buffer.read()); factory.register();"
            "print(factory.make(0).observation_space, gymnasium.make('rayvec-tests/Carried-v3', size=5).action_space)"
        )
        done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=False)
        assert (done.stdout, done.returncode) == (b"Discrete(4) Discrete(2)\n", 0), done.stderr.decode()

    def test_what_is_known_there_already_stays(self) -> None:
        factory = EnvFactory.build([CountingEnv])
        before = dict(gymnasium.registry)
        factory.register()
        assert dict(gymnasium.registry) == before

    def test_nothing_is_made_before_it_is_asked_for(self) -> None:
        def explode() -> Any:
            raise AssertionError("made too early")

        factory = EnvFactory.build([explode] * 2)
        pickle.loads(factory.to_bytes())

    def test_an_id_with_its_module(self) -> None:
        assert EnvFactory.build("helpers.registers_one:rayvec-tests/ByModule-v0").make(
            0
        ).observation_space == spaces.Discrete(11)

    @pytest.mark.filterwarnings("ignore:.*latest:UserWarning")
    def test_an_id_without_a_version_is_what_gymnasium_makes_of_it(self) -> None:
        expected, got = gymnasium.make("CartPole").spec, EnvFactory.build("CartPole").make(0).spec
        assert expected is not None and got is not None and got.id == expected.id

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"env": "NoSuch-v0"},
            {"env": "CartPole-v99"},
            {"env": "nowhere/CartPole-v1"},
            {"env": "no_such_module:CartPole-v1"},
            {"env": "not an id!"},
            {"env": "CartPole-v1", "num_envs": 0},
            {"env": "CartPole-v1", "num_envs": 2.0},
            {"env": "CartPole-v1", "num_envs": False},
            {"env": []},
            {"env": None},
            {"env": [CountingEnv, 3]},
            {"env": [CountingEnv], "num_envs": 2},
            {"env": [CountingEnv], "env_kwargs": {"x": 1}},
        ],
        ids=repr,
    )
    def test_mistakes_are_explained(self, kwargs: dict[str, Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            EnvFactory.build(**kwargs)
        for word in ("Expected:", "Got:", "Remedy:"):
            assert word in str(caught.value)
        if isinstance(kwargs["env"], str) and "num_envs" not in kwargs:
            assert isinstance(caught.value, gymnasium.error.NameNotFound)
