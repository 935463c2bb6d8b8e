"""Wrappers: for the command line (``--wrappers rayvec.wrappers:atari``), for the start of training, and for masks."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit
from numpy.typing import NDArray

from rayvec.errors import ConfigError, message

__all__ = ["MASK_KEY", "ActionMask", "FireToServe", "StaggeredStart", "atari", "num_choices"]

Env = gymnasium.Env[Any, Any]

MASK_KEY = "action_mask"
"""Under which key an info or a Dict observation says which actions are allowed."""


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
        ConfigError: The game skips frames itself, or OpenCV is not installed.
    """
    if getattr(env.unwrapped, "_frameskip", 1) != 1:
        raise ConfigError(
            "Only this wrapper skips frames.",
            expected="a game made with frameskip=1",
            got=f"frameskip={env.unwrapped._frameskip}",  # type: ignore[attr-defined]
            remedy="Pass env_kwargs={'frameskip': 1} (--env-kwargs frameskip 1 on the command line).",
        )
    try:
        env = AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            "OpenCV resizes the frames of Atari.",
            expected="opencv-python-headless",
            got=str(error),
            remedy="Install rayvec[atari].",
        ) from error
    get_meanings = getattr(env.unwrapped, "get_action_meanings", None)
    if get_meanings is not None and get_meanings()[1:2] == ["FIRE"]:
        env = FireToServe(env)
    return FrameStackObservation(env, 4)


def _time_limit(env: Env) -> int:
    """Returns the steps after which an environment truncates an episode.

    Raises:
        ConfigError: It has no time limit.
    """
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, TimeLimit):
            return layer._max_episode_steps
        layer = layer.env
    if layer.spec is not None and layer.spec.max_episode_steps is not None:
        return layer.spec.max_episode_steps
    raise ConfigError(
        "stagger_starts spreads the ends of the first episodes over the time limit of the environment.",
        expected="an environment with a time limit (max_episode_steps)",
        got=f"{layer.spec.id if layer.spec else layer}, which has none",
        remedy="Leave stagger_starts out, or pass env_kwargs={'max_episode_steps': 1000}.",
    )


class StaggeredStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates the first episode after a number of steps that is drawn from its seed.

    Environments that all truncate after the same number of steps then do so at different times. The number is uniform
    between 1 and the time limit of the environment. Only a reset with a seed below 2^30, as training gives, is
    followed by such an episode; evaluations have larger seeds.

    Args:
        env: An environment with a time limit.

    Raises:
        ConfigError: The environment has no time limit.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._time_limit = _time_limit(env)
        self._num_left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode, which is short if a seed of training is given."""
        self._num_left = 0
        if seed is not None and seed < 2**30:
            self._num_left = int(np.random.default_rng([seed, 1]).integers(1, self._time_limit, endpoint=True))
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step; truncates the episode if it was the last of a short one."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._num_left -= 1
        return obs, reward, terminated, truncated or (self._num_left == 0 and not terminated), info


class ActionMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes the action mask of infos a part of the observation, where PPO and IMPALA read it.

    Observations become ``{"observation": obs, "action_mask": mask}``. The mask has a number for each choice of the next
    action, ``int8 [P]``, 0 where it is not allowed. It is all 1 where an info has no ``"action_mask"``. An environment
    whose observation is a Dict with that key keeps its observations. Every mask is checked.

    :func:`rayvec.train` applies this wrapper itself where the first info has a mask.

    Args:
        env: An environment with a Discrete or MultiDiscrete action space.

    Raises:
        ConfigError: The action space is another one.
        ValueError: A step or reset gave a mask that allows nothing, or of another size.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._sizes = num_choices(env.action_space)
        if not self._sizes:
            raise ConfigError(
                "A mask says which of the choices of an action are allowed.",
                expected="a Discrete or MultiDiscrete action space",
                got=env.action_space,
                remedy="Leave the wrapper out.",
            )
        space = env.observation_space
        self._is_in_obs = isinstance(space, spaces.Dict) and MASK_KEY in space.spaces
        if not self._is_in_obs:
            mask = spaces.MultiBinary(sum(self._sizes))
            self.observation_space = spaces.Dict({"observation": space, MASK_KEY: mask})
        self._num_steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        obs, info = self.env.reset(**kwargs)
        self._num_steps = 0
        return self._with_mask(obs, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step. The mask of an episode's last observation may allow nothing."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._num_steps += 1
        return self._with_mask(obs, info, is_last=terminated or truncated), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: dict[str, Any], *, is_last: bool = False) -> Any:
        given = obs[MASK_KEY] if self._is_in_obs else info.get(MASK_KEY)
        mask = np.ones(sum(self._sizes), np.int8) if given is None else self._flat(given)
        firsts = np.cumsum((0, *self._sizes[:-1]))
        if not is_last and not np.logical_or.reduceat(mask != 0, firsts).all():
            raise ValueError(
                message(
                    "An action mask allows at least one choice of each component of an action.",
                    expected=f"a number other than 0 among each of {list(self._sizes)} choices",
                    got=f"{mask.tolist()} after {self._num_steps} steps of the episode",
                    remedy="Correct the environment's mask, or end the episode where no action is left.",
                )
            )
        return obs if self._is_in_obs else {"observation": obs, MASK_KEY: mask}

    def _flat(self, given: Any) -> NDArray[np.int8]:
        parts = given if isinstance(given, tuple | list) else (given,)
        mask = np.concatenate([np.ravel(part) for part in parts])
        if mask.shape != (sum(self._sizes),):
            raise ValueError(
                message(
                    "An action mask has one number for each choice of an action.",
                    expected=f"{sum(self._sizes)} numbers for {self.env.action_space}",
                    got=f"{len(mask)} after {self._num_steps} steps of the episode",
                    remedy="Correct the environment's mask, or pass action_masks=False.",
                )
            )
        allowed: NDArray[np.int8] = (mask != 0).astype(np.int8)
        return allowed


def num_choices(action_space: spaces.Space[Any]) -> tuple[int, ...]:
    """Returns the number of choices of each component of a Discrete or MultiDiscrete; nothing for other spaces."""
    match action_space:
        case spaces.Discrete(n=n):
            return (int(n),)
        case spaces.MultiDiscrete(nvec=nvec):
            return tuple(int(n) for n in nvec.flat)
    return ()
