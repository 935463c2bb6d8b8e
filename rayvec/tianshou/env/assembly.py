"""Turns answers into the arrays that Tianshou would have made of what environments returned.

The counterpart of :mod:`rayvec.tianshou.env.pool_env`: rewards of several agents are taken out of the infos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkInfo, Tree, objects, tree_map
from rayvec.data.columns import unwrapped
from rayvec.data.layouts import index_tree
from rayvec.errors import require
from rayvec.fleet.restarts import RESTARTED
from rayvec.tianshou.env.pool_env import REWARD

__all__ = ["StepResult", "assembled_chunk", "observations", "step_result"]

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
