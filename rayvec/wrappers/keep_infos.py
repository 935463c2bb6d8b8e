"""Infos without what a training does not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium

from rayvec.wrappers.action_mask import MASK_KEY

__all__ = ["KeepInfos"]


class KeepInfos(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Drops infos, such as a frame in each of them, but action masks and, in an episode's last step, some numbers.

    Args:
        env: The environment.
        names: Which keys of the last info of an episode are kept.
        masks: Whether action masks are kept.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], names: Sequence[str] = (), masks: bool = False) -> None:
        super().__init__(env)
        self._always = (MASK_KEY,) if masks else ()
        self._at_ends = (*self._always, *names)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        obs, info = self.env.reset(**kwargs)
        return obs, _kept(info, self._always)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if info:
            info = _kept(info, self._at_ends if terminated or truncated else self._always)
        return obs, reward, terminated, truncated, info


def _kept(info: Any, names: Any) -> Any:
    """Returns an info with some keys alone; what is no dict is left to the check of answers."""
    return {name: info[name] for name in info if name in names} if isinstance(info, dict) else info
