"""Any environment that Tianshou steps, as one that a pool can step: the worker's half of the Tianshou adapter.

Tianshou takes any result of an environment: observations that do not match their space, rewards of
several agents, a ``reset`` without arguments, no spaces at all. A pool has arrays of the space's shapes and
data types, and rewards in ``float64``. A value that does not fit into these exactly is sent in the info, under one
key, and :mod:`rayvec.tianshou.env.assembly` takes it out again. An environment that keeps to its spaces pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from rayvec.pools.shared_memory import ArrayLayout

__all__ = ["APART", "FLOAT", "AnySpace", "PoolEnv"]

APART = "rayvec_apart"
"""Key of an info dict: what is sent apart from the arrays, by ``obs``, ``rew``, ``rew_char`` and ``seeds``."""
FLOAT = "d"
"""The ``dtype.char`` that rewards have until an environment says otherwise, and again after a reset."""

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
        layout = ArrayLayout.of(self.observation_space)
        self._fits: Callable[[Any], bool] = _is_something if layout is None else fits(self.observation_space)
        self._blank = None if layout is None else layout.empty(())
        self._rew_char = FLOAT

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
        self._rew_char = FLOAT
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
            return obs, {**info, APART: {"seeds": [seed]}}
        return self._blank, {APART: {"seeds": self._env.seed(seed)}}

    def _first(self, result: Any) -> tuple[Any, dict[str, Any]]:
        assert isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], dict), (
            "The environment does not adhere to the Gymnasium's API."
        )
        obs, info = result
        if self._fits(obs):
            return obs, info
        return self._blank, {**info, APART: {"obs": obs}}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps; values that do not fit are sent apart."""
        obs, rew, terminated, truncated, info = self._env.step(action)
        apart: dict[str, Any] = {}
        if type(rew) not in _FLOATS or self._rew_char != FLOAT:
            rew = self._plain_reward(rew, apart)
        if not self._fits(obs):
            apart["obs"], obs = obs, self._blank
        return obs, rew, terminated, truncated, {**info, APART: apart} if apart else info

    def _plain_reward(self, rew: Any, apart: dict[str, Any]) -> float:
        """Returns a reward as a float, and puts its type into `apart` where that has changed."""
        array = np.asarray(rew)
        if array.shape != () or array.dtype.kind not in "biuf" or array.dtype.type(float(array)) != array:
            apart["rew"] = rew
            return 0.0
        if array.dtype.char != self._rew_char:
            apart["rew_char"] = self._rew_char = array.dtype.char
        return float(array)

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


def _is_something(obs: Any) -> bool:
    return obs is not None  # a pool takes None for no observation at all


def fits(space: Space[Any], *, inner: bool = False) -> Callable[[Any], bool]:
    """Returns a function that says whether an observation stays exactly the same in arrays of this space.

    Args:
        space: A space that has an :class:`~rayvec.pools.shared_memory.ArrayLayout`.
        inner: Whether it is part of another space. A number by itself is stacked, and only its data type matters.
            One in a dict is kept as it is, and comes back from an array as a NumPy scalar.
    """
    if isinstance(space, spaces.Dict):
        by_key = {key: fits(child, inner=True) for key, child in space.spaces.items()}
        return lambda obs: (
            type(obs) is dict and obs.keys() == by_key.keys() and all(f(obs[k]) for k, f in by_key.items())
        )
    if isinstance(space, spaces.Tuple):
        places = [fits(child, inner=True) for child in space.spaces]
        return lambda obs: (
            type(obs) is tuple and len(obs) == len(places) and all(f(o) for f, o in zip(places, obs, strict=True))
        )
    dtype, shape = space.dtype, space.shape
    if inner and shape == ():
        return lambda obs: isinstance(obs, np.generic) and obs.dtype == dtype

    def fits_array(obs: Any) -> bool:
        if type(obs) is not np.ndarray:
            if inner:
                return False
            try:
                obs = np.asarray(obs)
            except ValueError:  # ragged
                return False
        return bool(obs.dtype == dtype and obs.shape == shape)

    return fits_array
