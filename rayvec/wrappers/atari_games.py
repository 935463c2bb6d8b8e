"""The usual preprocessing of Atari games."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from rayvec.errors import ConfigError

Env = gymnasium.Env[Any, Any]


class FireToServe(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE when a game waits for it: after a reset, and after each lost life.

    Without it, a greedy agent that never presses FIRE would wait for ever. The rewards of these steps count.

    Args:
        env: An Atari game that has a FIRE button.
    """

    _FIRE = 1

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._lives = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode and presses FIRE; if that ends the game, begins another episode."""
        obs, info = self.env.reset(**kwargs)
        obs, _, terminated, truncated, info = self.env.step(self._FIRE)
        if terminated or truncated:
            obs, info = self.env.reset()
        self._lives = info.get("lives", 0)
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes a step; if it cost a life but did not end the game, presses FIRE in a second step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        lost_life = info.get("lives", 0) < self._lives
        if lost_life and not (terminated or truncated):
            obs, earned, terminated, truncated, info = self.env.step(self._FIRE)
            reward = float(reward) + float(earned)
        self._lives = info.get("lives", 0)
        return obs, float(reward), terminated, truncated, info


def atari(env: Env) -> Env:
    """Applies the usual Atari preprocessing: ``uint8 (4, 84, 84)``, four grey frames, each the maximum of two.

    Each action is repeated for four frames. An episode begins with up to 30 no-op frames and ends with the game, not
    with a life (Machado et al., "Revisiting the Arcade Learning Environment", 2018). In games with a FIRE button,
    `FireToServe` presses it. Rewards are not clipped; the learner can do that.

    Args:
        env: A game of ``ale_py`` made with ``frameskip=1``.

    Raises:
        ConfigError: The game skips frames itself.
        DependencyNotInstalled: OpenCV is not installed.
    """
    if getattr(env.unwrapped, "_frameskip", 1) != 1:
        raise ConfigError(
            f"frameskip is {env.unwrapped._frameskip}. This wrapper skips frames itself: "  # type: ignore[attr-defined]
            "pass env_kwargs={'frameskip': 1} (--env-kwargs frameskip 1 on the command line)."
        )
    env = AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    if env.unwrapped.get_action_meanings()[1:2] == ["FIRE"]:  # type: ignore[attr-defined]
        env = FireToServe(env)
    return FrameStackObservation(env, 4)
