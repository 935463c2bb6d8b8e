"""Action masks: those in infos become a part of observations."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rayvec.errors import ConfigError

MASK_KEY = "action_mask"
"""Under which key an info or a Dict observation says which actions are allowed."""


class ActionMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes the action mask of infos a part of the observation, where PPO, IMPALA and SAC read it.

    Observations become ``{"observation": obs, "action_mask": mask}``. The mask has a number for each choice of the next
    action, ``int8 [P]``, 0 where it is not allowed. It is all 1 where an info has no ``"action_mask"``. An environment
    whose observation is a Dict with that key keeps its observations. Every mask is checked.

    Args:
        env: An environment with a Discrete or MultiDiscrete action space, or with such parts in a Dict or Tuple.

    Raises:
        ConfigError: The action space is another one.
        ValueError: A step or reset gave a mask that allows nothing, of another size, or of something else than numbers.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._sizes = num_choices(env.action_space)
        if not self._sizes:
            raise ConfigError(f"The action space is {env.action_space}. ActionMask requires Discrete or MultiDiscrete.")
        space = env.observation_space
        self._is_in_obs = isinstance(space, spaces.Dict) and MASK_KEY in space.spaces
        if not self._is_in_obs:
            mask = spaces.MultiBinary(sum(self._sizes))
            self.observation_space = spaces.Dict({"observation": space, MASK_KEY: mask})

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        obs, info = self.env.reset(**kwargs)
        return self._with_mask(obs, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step. The mask of an episode's last observation may allow nothing."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(obs, info, is_last=terminated or truncated), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: dict[str, Any], *, is_last: bool = False) -> Any:
        given = obs[MASK_KEY] if self._is_in_obs else info.get(MASK_KEY)
        mask = np.ones(sum(self._sizes), np.int8) if given is None else self._flat(given)
        firsts = np.cumsum((0, *self._sizes[:-1]))
        if not is_last and not np.logical_or.reduceat(mask != 0, firsts).all():
            raise ValueError(
                f"The action mask {mask.tolist()} allows no choice of a component. Correct the environment's mask, or "
                "end the episode where no action is left."
            )
        return obs if self._is_in_obs else {"observation": obs, MASK_KEY: mask}

    def _flat(self, given: Any) -> NDArray[np.int8]:
        values = given.tolist() if isinstance(given, np.ndarray) and given.dtype.hasobject else given
        parts = values if isinstance(values, tuple | list) and len(values) else (values,)
        mask = np.concatenate([np.ravel(part) for part in parts])
        ends, allowed_ends = (set(np.cumsum(sizes)) for sizes in ([np.size(part) for part in parts], self._sizes))
        are_numbers = mask.dtype.kind in "biuf" and not np.isnan(mask).any()
        if not are_numbers or len(mask) != sum(self._sizes) or not (ends <= allowed_ends or allowed_ends <= ends):
            raise ValueError(
                f"The action mask is {given!r:.200}. {self.env.action_space} needs "
                f"{' + '.join(map(str, self._sizes))} numbers: correct the mask."
            )
        return np.asarray(mask != 0, np.int8)


def num_choices(action_space: spaces.Space[Any]) -> tuple[int, ...]:
    """Returns the number of choices of each component of a Discrete or MultiDiscrete; nothing for other spaces.

    For a Dict or Tuple, it is those of all its parts.
    """
    match action_space:
        case spaces.Discrete(n=n):
            return (int(n),)
        case spaces.MultiDiscrete(nvec=nvec):
            return tuple(int(n) for n in nvec.flat)
        case spaces.Dict() | spaces.Tuple():
            parts = action_space.values() if isinstance(action_space, spaces.Dict) else action_space.spaces
            return tuple(size for part in parts for size in num_choices(part))
    return ()
