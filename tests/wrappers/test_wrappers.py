"""The Atari wrappers: frames, FIRE, and a run with them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rayvec.errors import ConfigError
from rayvec.wrappers import FireToServe, atari

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def make(game: str = "Breakout", **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return atari(gymnasium.make(f"ale_py:ALE/{game}-v5", frameskip=1, **kwargs))


def test_four_grey_frames_as_bytes() -> None:
    env = make()
    assert env.observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    obs, _ = env.reset(seed=0)
    for _ in range(6):
        before = np.asarray(obs)
        obs, *_ = env.step(0)
        np.testing.assert_array_equal(np.asarray(obs)[:3], before[1:])
    assert np.asarray(obs).std() > 1
    env.close()


def test_frames_are_skipped_once() -> None:
    with pytest.raises(ConfigError, match=r"frameskip is 4.*--env-kwargs frameskip 1"):
        atari(gymnasium.make("ale_py:ALE/Breakout-v5"))


def test_a_player_that_never_fires_plays_to_the_end() -> None:
    """All five lives are lost, and each of them is served: without that the ball would never come."""
    env = make(repeat_action_probability=0.0)
    env.reset(seed=3)
    lives = []
    for _ in range(2000):
        _, _, terminated, _, info = env.step(0)
        lives.append(info["lives"])
        if terminated:
            break
    assert terminated and sorted(set(lives)) == [0, 1, 2, 3, 4, 5]
    env.close()


class _Counter(gymnasium.Env[Any, Any]):
    """Loses a life at every third step; remembers what was pressed."""

    observation_space, action_space = spaces.Discrete(100), spaces.Discrete(4)

    def reset(self, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        self.pressed: list[int] = []
        return 0, {"lives": 3}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.pressed.append(action)
        lives = 3 - len(self.pressed) // 3
        return len(self.pressed), 1.0, lives == 0, False, {"lives": lives}


def test_fire_serves_after_a_reset_and_each_lost_life() -> None:
    inner = _Counter()
    env = FireToServe(inner)
    obs, _ = env.reset()
    assert obs == 1
    earned = 0.0
    while True:
        _, reward, terminated, _, _ = env.step(2)
        earned += reward
        if terminated:
            break
    assert inner.pressed == [1, 2, 2, 1, 2, 2, 1, 2, 2] and earned == 8
