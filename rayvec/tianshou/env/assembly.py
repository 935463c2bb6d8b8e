"""Turns answers into the arrays that Tianshou would have made of what environments returned.

The counterpart of :mod:`rayvec.tianshou.env.pool_env`: rewards of several agents are taken out of the infos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkInfo, ChunkInfos, Tree, objects, tree_map
from rayvec.data.columns import unwrapped
from rayvec.data.layouts import index_tree
from rayvec.errors import ConfigError
from rayvec.fleet.restarts import RESTARTED
from rayvec.tianshou.env.pool_env import REWARD

__all__ = ["StepResult", "assembled_chunk", "own_observations", "stack", "step_result"]

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
    obs = stack(own_observations(index_tree(arrays["obs"], rows), len(infos)))
    return obs, rewards, arrays["terminated"][rows].copy(), arrays["truncated"][rows].copy(), objects(infos)


def own_observations(obs: Tree, count: int) -> NDArray[Any] | list[Any]:
    """Returns observations in memory of their own, as one array if they are all in one, else one by one."""
    own = tree_map(np.copy, obs)
    if isinstance(own, np.ndarray) and own.dtype != object:
        return own
    return [index_tree(own, row) for row in range(count)]


def _rewards(rew: NDArray[np.float64], infos: Sequence[dict[str, Any]]) -> NDArray[np.float64]:
    """Returns rewards, ``[n]`` or, of several agents, ``[n, *rew_shape]``."""
    given = [info.pop(REWARD, None) for info in infos]
    shaped = [reward for reward in given if reward is not None]
    if not shaped:
        return rew.copy()
    nothing = np.zeros_like(shaped[0])
    instead = [nothing if info.get(RESTARTED) is True else each for info, each in zip(infos, rew, strict=True)]
    return np.stack([other if reward is None else reward for reward, other in zip(given, instead, strict=True)])


def assembled_chunk(chunk: Chunk) -> Chunk:
    """Returns a chunk with the environments' own infos and, of several agents, rewards ``rew [T, N, *rew_shape]``.

    These are 0 where no step happened.

    Raises:
        ConfigError: Not all rewards have one shape.
    """
    lacking, rew = chunk.valid.copy(), None
    infos, reset_infos = _own_infos(chunk.infos), _own_infos(chunk.reset_infos)
    for item in infos:
        reward = item.info.pop(REWARD, None)
        if reward is not None:
            rew = np.zeros((*lacking.shape, *reward.shape)) if rew is None else rew
            _check_shape(reward.shape, rew.shape[2:])
            rew[item.t, item.n], lacking[item.t, item.n] = reward, False
    if rew is not None and lacking.any():
        _check_shape((), rew.shape[2:])
    own = ChunkInfos.of(item for item in infos if item.info)
    return replace(chunk, rew=chunk.rew if rew is None else rew, infos=own, reset_infos=ChunkInfos.of(reset_infos))


def _own_infos(infos: ChunkInfos) -> list[ChunkInfo]:
    return [item._replace(info=unwrapped(item.info)) for item in infos]


def _check_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ConfigError(
            "The rewards of a chunk have one shape.",
            expected=f"rewards of shape {expected} at every step",
            got=f"one of shape {found}",
            remedy="Let all environments return rewards of one shape.",
        )


def stack(obs: NDArray[Any] | list[Any]) -> NDArray[Any]:
    """Stacks observations as Tianshou does, which leaves dicts, and what can't be stacked, as objects."""
    if isinstance(obs, np.ndarray):
        return obs
    if all(type(value) is dict for value in obs):
        return objects(obs)
    try:
        return np.stack(obs)
    except ValueError:
        return np.array(obs, dtype=object)
