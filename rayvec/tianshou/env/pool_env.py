"""Any environment that Tianshou steps, as one that a pool can step: the worker's half of the Tianshou adapter.

Tianshou takes rewards of several agents, a ``reset`` without arguments, and environments without spaces. A pool has one
``float64`` reward for each step. Rewards that are arrays are sent in the info, and
:mod:`rayvec.tianshou.env.assembly` takes them out again.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space

from rayvec.data.columns import whole
from rayvec.data.layouts import ArrayLayout

__all__ = ["REWARD", "SEEDS", "AnySpace", "PoolEnv"]

REWARD = "rayvec_reward"
"""Key of the info of a step: its reward, if that is an array."""
SEEDS = "rayvec_seeds"
"""Key of the info of a reset for :meth:`RayVectorEnv.seed`: what seeding returned."""

_FLOATS = (float, np.float64)
_KNOWN = ("action_space", "metadata", "observation_space", "reward_range", "spec")


class AnySpace(Space[Any]):
    """A space of any objects."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Returns None, which is an element too."""
        return None

    def contains(self, x: Any) -> bool:
        """Everything is an element."""
        return True

    @property
    def is_np_flattenable(self) -> bool:
        """Always False."""
        return False

    def __eq__(self, other: object) -> bool:
        """All of them are equal."""
        return isinstance(other, AnySpace)

    __hash__ = None  # type: ignore[assignment]


class PoolEnv(gymnasium.Env[Any, Any]):
    """Makes an environment fit a pool; the adapter calls its methods beside Gymnasium's.

    Args:
        env: An environment of any kind that Tianshou takes, with spaces or without.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self.observation_space = _space(env, "observation_space")
        self.action_space = _space(env, "action_space")
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)

    @property
    def unwrapped(self) -> Any:
        """The environment without its wrappers."""
        return getattr(self._env, "unwrapped", self._env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets with the arguments of :meth:`RayVectorEnv.reset`, or seeds as Tianshou does.

        Args:
            seed: Passed on if there is one.
            options: ``kwargs``: further arguments; or ``seed``: present for :meth:`RayVectorEnv.seed`.
        """
        options = options or {}
        if "seed" in options:
            return self._seed(seed)
        kwargs = dict(options.get("kwargs", ()))
        if seed is not None:
            kwargs["seed"] = seed
        return self._first(self._env.reset(**kwargs))

    def _seed(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        """Seeds the space of actions and the environment, by its ``seed`` method or else by a reset."""
        if not isinstance(self.action_space, AnySpace):
            self.action_space.seed(seed)
        if not hasattr(self._env, "seed"):
            obs, info = self._first(self._env.reset(seed=seed))
            return obs, {**info, SEEDS: [seed]}
        layout = ArrayLayout.of(self.observation_space)
        return None if layout is None else layout.empty(()), {SEEDS: self._env.seed(seed)}

    def _first(self, result: Any) -> tuple[Any, dict[str, Any]]:
        assert isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], dict), (
            "The environment does not adhere to the Gymnasium's API."
        )
        return result[0], whole(result[1])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps; a reward that is an array goes into the info."""
        obs, rew, terminated, truncated, info = self._env.step(action)
        if type(rew) not in _FLOATS and np.ndim(rew):
            return obs, 0.0, terminated, truncated, {**whole(info), REWARD: np.asarray(rew, np.float64)}
        return obs, rew, terminated, truncated, whole(info)

    def close(self) -> None:
        """Closes."""
        self._env.close()

    def get_env_attr(self, name: str) -> Any:
        """Returns an attribute of the outermost wrapper that has it; None if none has one that Gymnasium knows."""
        try:
            if isinstance(self._env, gymnasium.Wrapper):
                return self._env.get_wrapper_attr(name)
            return getattr(self._env, name)
        except AttributeError:
            if name in _KNOWN:
                return None
            raise

    def set_env_attr(self, name: str, value: Any) -> None:
        """Sets an attribute within all wrappers."""
        setattr(self.unwrapped, name, value)

    def render_env(self, **kwargs: Any) -> Any:
        """Renders."""
        return self._env.render(**kwargs)


def _space(env: Any, name: str) -> Space[Any]:
    space = getattr(env, name, None)
    return space if isinstance(space, Space) else AnySpace()
