"""An environment as Tianshou steps it, the worker's half of the adapter: ``reset`` takes any arguments."""

from __future__ import annotations

from typing import Any

import gymnasium

from rayvec.data.columns import whole
from rayvec.envs.factory import check_env

__all__ = ["PoolEnv"]

_RESERVED = ("metadata", "reward_range", "spec")
"""Attributes that are None where an environment lacks them."""


class PoolEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes an environment fit a pool; the adapter calls its methods beside Gymnasium's.

    Args:
        env: The environment.

    Raises:
        ConfigError: It lacks what an environment has, such as a space.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(check_env(env))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets with the arguments of :meth:`RayVectorEnv.reset`, or seeds as Tianshou does.

        Args:
            seed: Passed on if there is one.
            options: ``kwargs``: further arguments; or ``seed``: present for :meth:`RayVectorEnv.seed`.
        """
        options = options or {}
        if "seed" in options:
            self.action_space.seed(seed)
        kwargs = dict(options.get("kwargs", ()))
        if seed is not None:
            kwargs["seed"] = seed
        result = self.env.reset(**kwargs)
        return (result[0], whole(result[1])) if isinstance(result, tuple) and len(result) == 2 else result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps."""
        obs, rew, terminated, truncated, info = self.env.step(action)
        return obs, rew, terminated, truncated, whole(info)

    def get_env_attr(self, name: str) -> Any:
        """Returns an attribute of the outermost wrapper that has it."""
        return getattr(self.env, name, None) if name in _RESERVED else self.env.get_wrapper_attr(name)

    def set_env_attr(self, name: str, value: Any) -> None:
        """Sets an attribute within all wrappers."""
        setattr(self.unwrapped, name, value)

    def render_env(self, **kwargs: Any) -> Any:
        """Renders."""
        return self.env.render(**kwargs)
