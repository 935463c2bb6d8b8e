"""Environments that save their state: episodes continue in other environments, wherever these step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation, NormalizeReward, RecordEpisodeStatistics
from helpers.own_envs import Lock
from helpers.testing import PlainEnv, assert_identical

from rayvec.errors import ConfigError
from rayvec.vector.ray_vec_env import RayVecEnv
from rayvec.wrappers import SaveState

WHERE: dict[str, dict[str, Any]] = {
    "this process": {"num_nodes": 0, "workers_per_node": 0},
    "two workers": {"num_nodes": 0, "workers_per_node": 2},
    "two nodes": {"num_nodes": 2, "workers_per_node": 1},
}


class Dice(PlainEnv):
    """Throws a die until it is a six; its state is an object."""

    observation_space = gymnasium.spaces.Box(0, 6, (1,))

    def step(self, action: Any) -> Any:
        thrown = int(self.np_random.integers(1, 7))
        return np.float32([thrown]), float(thrown), thrown == 6, False, {"thrown": thrown}

    def get_state(self) -> Any:
        return self.np_random

    def set_state(self, state: Any) -> None:
        self.np_random = state


class Broken(Dice):
    """Can't be put into a state."""

    def set_state(self, state: Any) -> None:
        raise OSError("no licence")


def cart_pole() -> Any:
    env = FrameStackObservation(gymnasium.make("CartPole-v1", max_episode_steps=13), 3)
    return NormalizeReward(SaveState(RecordEpisodeStatistics(env)))


def cheetah() -> Any:
    return SaveState(gymnasium.make("HalfCheetah-v5", max_episode_steps=20))


def limited_dice() -> Any:
    return gymnasium.wrappers.TimeLimit(Dice(), 5)


def played(env: RayVecEnv, num_steps: int) -> list[Any]:
    """Returns what steps bring, without the wall time of episodes."""
    found, generator = [], np.random.default_rng(num_steps)
    for _ in range(num_steps):
        space = env.single_action_space
        shape = (env.num_envs, *space.shape)  # type: ignore[misc]
        is_box = isinstance(space, gymnasium.spaces.Box)
        found.append(env.step(generator.uniform(-1, 1, shape) if is_box else generator.integers(0, 2, shape)))
        found[-1][4].get("episode", {}).pop("t", None)
    return found


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("source", "target"), [*zip(WHERE, [*WHERE][1:] + [*WHERE][:1], strict=True)])
@pytest.mark.parametrize("make", [cart_pole, cheetah, limited_dice])
def test_episodes_continue_where_their_states_are_set(make: Callable[[], Any], source: str, target: str) -> None:
    with RayVecEnv([make] * 4, **WHERE[source]) as env, RayVecEnv([make] * 4, **WHERE[target]) as other:
        env.reset(seed=3)
        played(env, 17)
        states = env.get_states()
        assert states is not None
        expected = played(env, 30)
        for _ in range(2):  # a state can be set again
            other.set_states(states)
            assert_identical(played(other, 30), expected)


@pytest.mark.parametrize("on_env_error", ["raise", "restart"])
def test_an_episode_whose_state_can_not_be_restored_is_cut(on_env_error: Any, caplog: pytest.LogCaptureFixture) -> None:
    with RayVecEnv([Dice, Broken], **WHERE["two workers"], on_env_error=on_env_error) as env:
        before = env.reset(seed=3)[0]
        env.set_states(env.get_states() or [])
        assert "raised OSError: no licence; restarted" in caplog.text
        obs, rew, _, truncated, info = env.step(np.zeros(2, np.int64))
    assert truncated.tolist() == [False, True] == info["env_restarted"].tolist()
    assert obs[1] == before[1] and rew[1] == 0


@pytest.mark.parametrize("where", ["this process", "two workers"])
def test_an_ended_episode_stays_ended_and_each_environment_needs_a_state(where: str) -> None:
    with RayVecEnv([limited_dice] * 2, **WHERE[where], autoreset_mode=AutoresetMode.DISABLED) as env:
        env.reset(seed=3)
        ended = np.zeros(2, np.bool_)
        while not ended.any():
            _, _, terminated, truncated, _ = env.step(np.zeros(2, np.int64))
            ended = terminated | truncated
        states = env.get_states() or []
        env.reset(seed=4)
        env.set_states(states)
        with pytest.raises(AssertionError, match="must be reset"):
            env.step(np.zeros(2, np.int64))
        for count in (1, 3):
            with pytest.raises(ConfigError, match=f"{count} states for 2 environments"):
                env.set_states([*states, *states][:count])
        env.reset(options={"reset_mask": ended})
        env.step(np.zeros(2, np.int64))


class Point(NamedTuple):
    x: float


HELD: dict[str, Callable[[Any], Any]] = {
    "holds a set": lambda env: {1},
    "holds a TimeLimit": lambda env: gymnasium.make("CartPole-v1"),
    "holds a CartPoleEnv": lambda env: gymnasium.make("CartPole-v1").unwrapped,
    "holds a Point": lambda env: Point(1.0),
    "holds a defaultdict": lambda env: defaultdict(int),
    "holds a list": lambda env: [OrderedDict()],
    "holds a MaskedArray": lambda env: np.ma.array([1]),  # type: ignore[no-untyped-call]
    "shares data with '_np_random'": lambda env: env.np_random,
    "shares data with 'board'": lambda env: env.board[1:],
    "shares data with 'moves'": lambda env: env.moves,
}


def board() -> Any:
    env = Dice()
    env.reset(seed=1)
    env.board, env.moves = np.zeros(2), deque([1, 2], maxlen=2)  # type: ignore[attr-defined]
    return SaveState(env)


@pytest.mark.parametrize("words", HELD)
def test_what_can_not_be_restored_as_it_was_is_refused(words: str) -> None:
    env = board()
    env.env.held = HELD[words](env.env)
    with pytest.raises(TypeError, match=f"state of Dice can't be saved: its attribute 'held' {words}. Let"):
        env.get_state()


def test_a_deque_keeps_its_length() -> None:
    env = SaveState(Dice())
    env.set_state(board().get_state())
    env.env.moves.append(3)  # type: ignore[attr-defined]
    assert env.env.moves == deque([2, 3])  # type: ignore[attr-defined]


def test_environments_without_a_state() -> None:
    here = WHERE["this process"]
    cases: list[tuple[Any, dict[str, Any]]] = [
        (lambda: gymnasium.make("CartPole-v1"), {}),
        (cart_pole, {"spare_envs": 1}),
    ]
    for make, settings in cases:
        with RayVecEnv([make], **here, **settings) as env:
            env.reset(seed=1)
            assert env.get_states() is None
    for wrapped in (lambda: Lock(Dice()), lambda: SaveState(Lock(Dice()))):
        with RayVecEnv([wrapped], **here) as env:
            env.reset(seed=1)
            with pytest.raises(TypeError, match="state of Lock can't be saved: its attribute 'seen' holds a set"):
                env.get_states()
            env.step([0])
