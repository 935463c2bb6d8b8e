"""An environment as Tianshou steps it: the worker's half of the Tianshou adapter.

Tianshou takes rewards of several agents, any arguments for ``reset``, and environments without spaces. A pool has one
``float64`` reward for each step. Rewards that are arrays are sent in the info, and
:mod:`rayvec.tianshou.env.assembly` takes them out again.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space

from rayvec.data.columns import whole
from rayvec.envs.factory import check_env

__all__ = ["REWARD", "AnySpace", "PoolEnv"]

REWARD = "rayvec_reward"
"""Key of the info of a step: its reward, if that is an array."""

_FLOATS = (float, np.float64)
_RESERVED = ("action_space", "metadata", "observation_space", "reward_range", "spec")
"""Attributes that are None where an environment lacks them."""


class AnySpace(Space[Any]):
    """The space of an environment that has none: every object is an element."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Returns None, which is an element too."""
        return None

    def contains(self, x: Any) -> bool:
        """Returns True."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnySpace)


class PoolEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes an environment fit a pool; the adapter calls its methods beside Gymnasium's.

    Args:
        env: The environment. A space that it lacks is an :class:`AnySpace`.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env if isinstance(env, gymnasium.Env) else check_env(env))
        for name in ("observation_space", "action_space"):
            if not hasattr(env, name):
                setattr(self, name, AnySpace())

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
        """Steps; a reward that is an array goes into the info."""
        obs, rew, terminated, truncated, info = self.env.step(action)
        reward: Any = rew
        info = whole(info)
        if type(reward) not in _FLOATS and np.ndim(reward):
            return obs, 0.0, terminated, truncated, {**info, REWARD: np.asarray(reward, np.float64)}
        return obs, reward, terminated, truncated, info

    def get_env_attr(self, name: str) -> Any:
        """Returns an attribute of the outermost wrapper that has it."""
        return getattr(self.env, name, None) if name in _RESERVED else self.env.get_wrapper_attr(name)

    def set_env_attr(self, name: str, value: Any) -> None:
        """Sets an attribute within all wrappers."""
        setattr(self.unwrapped, name, value)

    def render_env(self, **kwargs: Any) -> Any:
        """Renders."""
        return self.env.render(**kwargs)
