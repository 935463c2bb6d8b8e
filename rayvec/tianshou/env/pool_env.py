"""What Tianshou's environments give and take, as a fleet steps them, and back: `PoolEnv`, and what takes its answers.

Tianshou takes rewards of several agents, any arguments for ``reset``, and environments without spaces. A fleet has one
``float64`` reward for each step: rewards that are arrays are sent in the info, and taken out of it in the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkInfo, Tree, objects, tree_map
from rayvec.data.columns import unwrapped, whole
from rayvec.data.trees import index_tree
from rayvec.envs.factory import check_env
from rayvec.errors import require
from rayvec.fleet.restarts import RESTARTED

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


StepResult = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"""Observations, rewards, terminated, truncated and infos, each with one row for each environment."""


def step_result(
    arrays: Mapping[str, Any], infos: list[dict[str, Any]], rows: Any, env_ids: Sequence[int] | NDArray[Any]
) -> StepResult:
    """Returns what a step returns.

    Args:
        arrays: The last answers of all environments.
        infos: The info of each environment that has answered.
        rows: Which environments these are.
        env_ids: The same ids as the caller wrote them, which stand in the infos.
    """
    rewards = _rewards(arrays["rew"][rows], infos)
    for env_id, info in zip(env_ids, infos, strict=True):
        info["env_id"] = env_id
    obs = observations(arrays, rows, len(infos))
    return obs, rewards, arrays["terminated"][rows].copy(), arrays["truncated"][rows].copy(), objects(infos)


def observations(arrays: Mapping[str, Any], rows: Any, count: int, *, of_reset: bool = False) -> NDArray[Any]:
    """Returns observations of some environments in memory of their own, stacked as Tianshou does.

    Dicts, and what can't be stacked, are objects.

    Raises:
        TypeError: They are tuples, which Tianshou refuses in a reset.
    """
    own: Tree = tree_map(np.copy, index_tree(arrays["obs"], rows))
    if isinstance(own, np.ndarray) and own.dtype != object:
        return own
    each = [index_tree(own, row) for row in range(count)]
    if of_reset and isinstance(each[0], tuple):
        raise TypeError("Tuple observation space is not supported. ", "Please change it to array or dict space")
    if all(type(value) is dict for value in each):
        return objects(each)
    try:
        return np.stack(each)
    except ValueError:
        return np.array(each, dtype=object)


def _rewards(rew: NDArray[np.float64], infos: Sequence[dict[str, Any]]) -> NDArray[np.float64]:
    """Returns rewards, ``[n]`` or, of several agents, ``[n, *rew_shape]``."""
    given = [info.pop(REWARD, None) for info in infos]
    shaped = [reward for reward in given if reward is not None]
    if not shaped:
        return rew.copy()
    nothing = np.zeros_like(shaped[0])
    instead = [nothing if info.get(RESTARTED) is True else each for info, each in zip(infos, rew, strict=True)]
    return np.stack([other if reward is None else reward for reward, other in zip(given, instead, strict=True)])


def assembled_chunk(chunk: Chunk) -> tuple[Chunk, list[ChunkInfo]]:
    """Returns a chunk and the infos of its steps, as the environments returned them.

    Rewards of several agents are ``rew [T, N, *rew_shape]``, 0 where no step happened.

    Raises:
        ConfigError: Not all rewards have one shape.
    """
    infos = [item._replace(info=unwrapped(dict(item.info))) for item in chunk.infos]
    rewards = {(item.t, item.n): item.info.pop(REWARD) for item in infos if REWARD in item.info}
    if rewards:
        shapes = {reward.shape for reward in rewards.values()} | ({()} if len(rewards) < chunk.valid.sum() else set())
        require(
            len(shapes) == 1,
            f"The rewards of a chunk have the shapes {sorted(shapes)}. Let all environments return rewards of one "
            "shape at every step.",
        )
        rew = np.zeros((*chunk.rew.shape, *shapes.pop()))
        rew[tuple(np.array(list(rewards)).T)] = list(rewards.values())
        chunk = replace(chunk, rew=rew)
    return chunk, [item for item in infos if item.info]
