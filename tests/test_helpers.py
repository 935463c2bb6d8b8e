"""The tools of the tests: comparisons see every difference, and environments do what tests expect of them."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from helpers.exact import DriftEnv, SpaceEnv, TablePolicy, WordSpace, describe
from helpers.fleet_kit import stepper_of
from helpers.kinds import ALL_SPACES
from helpers.testing import CoinEnv, CountingEnv, FaultyEnv, TimedEnv, assert_identical, counting_errors

from rayvec.data import Chunk
from rayvec.rollout.loop import rollout

VALUES: list[Any] = [
    None,
    True,
    1,
    1.0,
    "1",
    b"1",
    (1,),
    [1],
    {"a": 1},
    {"b": 1},
    {"a": 2},
    np.int64(1),
    np.int32(1),
    np.float64(1.0),
    np.array(1),
    np.array([1]),
    np.array([1], np.int32),
    np.array([[1]]),
    np.array([2]),
    np.array([1], object),
    np.array([0.0]),
    np.array([-0.0]),
]


def test_identity_is_of_types_data_types_shapes_and_bits() -> None:
    for i, a in enumerate(VALUES):
        for j, b in enumerate(VALUES):
            if i == j:
                assert_identical(a, b)
            else:
                with pytest.raises(AssertionError):
                    assert_identical(a, b)
                with pytest.raises(AssertionError):
                    assert_identical({"x": [1, (a,)]}, {"x": [1, (b,)]})
    assert_identical(float("nan"), float("nan"))
    with pytest.raises(AssertionError):
        assert_identical({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_descriptions_tell_actions_apart() -> None:
    told = [describe(value) for value in VALUES]
    assert len(set(told)) == len(told)
    assert describe({"b": 1, "a": 2}) == describe({"a": 2, "b": 1})


@pytest.mark.parametrize(
    "make",
    [
        *(partial(SpaceEnv, space, space) for kind, space in ALL_SPACES.items() if kind != "box64"),
        CountingEnv,
        DriftEnv,
    ],
    ids=[*(kind for kind in ALL_SPACES if kind != "box64"), "counting", "drift"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_environments_are_good_citizens(make: Any) -> None:
    check_env(make(), skip_render_check=True, skip_close_check=True)


def test_answers_depend_on_the_seed_and_on_every_action() -> None:
    def play(seed: int, actions: list[Any]) -> list[Any]:
        env = SpaceEnv(ALL_SPACES["nested"], max_episode_steps=50)
        return [env.reset(seed=seed), *(env.step(action) for action in actions)]

    actions = [1, 0, np.int64(1)]
    assert_identical(play(1, actions), play(1, actions))
    for other in (play(2, actions), play(1, [1, 0, 1]), play(1, [1, 1, np.int64(1)])):
        with pytest.raises(AssertionError):
            assert_identical(other, play(1, actions))


def test_episodes_end_in_every_way() -> None:
    env = SpaceEnv(ALL_SPACES["discrete"])
    ends = set()
    env.reset(seed=0)
    for _ in range(300):
        _, _, terminated, truncated, _ = env.step(0)
        if terminated or truncated:
            ends.add((terminated, truncated))
            env.reset()
    assert ends == {(True, False), (False, True), (True, True)}


def test_words_are_a_space_gymnasium_does_not_know() -> None:
    space = WordSpace()
    space.seed(0)
    assert all(space.sample() in space for _ in range(20))
    assert space == WordSpace() and space != WordSpace("xyz") and 3 not in space
    assert not space.is_np_flattenable


class TestCounting:
    @pytest.fixture
    def chunks(self) -> list[Chunk]:
        pool = stepper_of([CountingEnv] * 2)
        pool.reset(np.arange(2), [0, 1])
        pool.recv(np.arange(2))
        return [rollout(pool, TablePolicy(), 20) for _ in range(2)]

    def test_what_is_right_is_right(self, chunks: list[Chunk]) -> None:
        assert counting_errors(chunks) == []

    def test_every_kind_of_lie_is_seen(self, chunks: list[Chunk]) -> None:
        first, second = chunks
        end = first.final_index[0].tolist()
        nothing = np.zeros_like(first.terminated)

        def changed(name: str, at: Any, by: int = 1) -> Chunk:
            array = getattr(first, name).copy()
            array[at] += by
            return replace(first, **{name: array})

        joined = replace(first, terminated=nothing, truncated=nothing, final_index=np.zeros((0, 2), int))
        lies = {
            "two episodes are joined": [replace(joined, final_obs=first.final_obs[:0])],
            "the final observation is that of the next episode": [changed("final_obs", (0, 1))],
            "a step is lost": [replace(first, obs=first.obs[1:], rew=first.rew[1:])],
            "a step is doubled": [changed("obs", (slice(5, None), 0, 3), -1)],
            "a reward stands elsewhere": [replace(first, rew=np.roll(first.rew, 1, 0))],
            "environments are mixed up": [replace(first, last_obs=first.last_obs[::-1])],
            "a chunk is lost": [first, rest_of(second)],
            "a chunk is doubled": [first, first],
            "an end is not told": [replace(first, terminated=first.terminated & (np.arange(20) != end[0])[:, None])],
        }
        for name, told in lies.items():
            try:
                seen = counting_errors(told)
            except (IndexError, ValueError):
                continue
            assert seen, name


def rest_of(chunk: Chunk) -> Chunk:
    """The same chunk, which begins one step late."""
    later = chunk.final_index[:, 0] >= 1
    return replace(
        chunk,
        obs=chunk.obs[1:],
        rew=chunk.rew[1:],
        terminated=chunk.terminated[1:],
        truncated=chunk.truncated[1:],
        final_index=chunk.final_index[later] - [1, 0],
        final_obs=chunk.final_obs[later],
    )


def test_coins_fall_on_both_sides() -> None:
    env = CoinEnv(1, 3)
    lens = []
    env.reset(seed=0)
    for _ in range(50):
        steps = 1
        while not env.step(0)[2]:
            steps += 1
        lens.append(steps)
        env.reset()
    assert set(lens) == {1, 3}


def test_faults_come_when_they_are_told_to() -> None:
    with pytest.raises(ValueError, match="broken"):
        FaultyEnv("raise", "init")
    env = FaultyEnv("raise", "reset", 1, partial(KeyError, "mine"))
    env.reset()
    with pytest.raises(KeyError, match="mine"):
        env.reset()
    env = FaultyEnv("raise", "step", 2)
    env.reset(seed=0)
    env.step(0)
    env.step(0)
    with pytest.raises(ValueError, match="broken"):
        env.step(0)


@pytest.mark.parametrize("busy", [True, False])
def test_steps_take_time_by_work_or_by_sleep(busy: bool) -> None:
    """Of the process's own CPU time a sleep takes little; of wall time neither takes less than it should."""
    env = TimedEnv(0.05, busy)
    env.reset(seed=0)
    wall, cpu = time.perf_counter(), time.process_time()
    env.step(0)
    assert time.perf_counter() - wall >= 0.05
    if not busy:
        assert time.process_time() - cpu < 0.05


class TestTablePolicy:
    def test_it_is_exact_in_any_batch(self) -> None:
        policy = TablePolicy(num_actions=5)
        rng = np.random.default_rng(0)
        obs = {"a": rng.normal(size=(40, 3)).astype(np.float32), "b": (rng.integers(0, 255, (40, 2, 2), np.uint8),)}
        noise = rng.random((40, 1))
        whole = policy.act(obs, noise)
        for rows in (slice(0, 1), slice(3, 17), slice(None, None, 7)):
            part = policy.act({"a": obs["a"][rows], "b": (obs["b"][0][rows],)}, noise[rows])
            assert_identical(part, (whole[0][rows].copy(), {name: x[rows].copy() for name, x in whole[1].items()}))

    def test_it_draws_by_its_table(self) -> None:
        policy = TablePolicy(num_actions=3, num_states=1)
        noise = (np.arange(10_000)[:, None] + 0.5) / 10_000
        actions, extras = policy.act(np.zeros((10_000, 1)), noise)
        shares = np.bincount(actions, minlength=3) / 10_000
        assert np.abs(shares - np.exp(policy._logp[0])).max() < 1e-3
        assert_identical(extras["logp"], policy._logp[0][actions])
        assert extras["logp"].dtype == np.float32

    def test_its_weights_are_itself(self) -> None:
        first, second = TablePolicy(seed=1), TablePolicy(seed=2)
        second.load_weights(first.weights())
        obs, noise = np.random.default_rng(0).normal(size=(30, 2)), np.random.default_rng(1).random((30, 1))
        assert_identical(second.act(obs, noise), first.act(obs, noise))
