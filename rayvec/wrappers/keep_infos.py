"""Infos that a training does not read are dropped where they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from rayvec.errors import ConfigError
from rayvec.wrappers.action_mask import MASK_KEY, num_choices


class KeepInfos(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Drops infos, such as a frame in each of them, but for some numbers in an episode's last step.

    Args:
        env: The environment.
        names: Which keys of the last info of an episode are kept.
        masks: Whether a mask of actions in the infos, which no policy would see, is refused.

    Raises:
        ConfigError: A reset gave such a mask.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], names: Sequence[str] = (), masks: bool = False) -> None:
        super().__init__(env)
        self._names = names
        is_seen = isinstance(env.observation_space, spaces.Dict) and MASK_KEY in env.observation_space.spaces
        self._refuses_masks = masks and not is_seen and bool(num_choices(env.action_space))

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        obs, info = self.env.reset(**kwargs)
        if self._refuses_masks and MASK_KEY in info:
            raise ConfigError(
                "The infos of the environment have an action_mask, which no policy sees. Pass "
                "wrappers=('rayvec.wrappers:ActionMask',), or action_masks=False to ignore it."
            )
        return obs, _kept(info, ())

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, _kept(info, self._names if terminated or truncated else ())


def _kept(info: Any, names: Any) -> Any:
    """Returns an info with some keys alone; what is no dict is left to the check of answers."""
    return {name: info[name] for name in info if name in names} if isinstance(info, dict) else info
