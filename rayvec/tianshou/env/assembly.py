"""Turns a pool's answers into the arrays that Tianshou would have made of what environments returned.

The counterpart of :mod:`rayvec.tianshou.env.pool_env`: rewards of several agents are taken out of the infos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkInfo, ChunkInfos, StepBatch, Tree, objects, tree_map
from rayvec.errors import ConfigError
from rayvec.pools.restart_state import is_restarted
from rayvec.pools.shared_memory import index_tree
from rayvec.tianshou.env.pool_env import REWARD

__all__ = ["StepResult", "assembled_chunk", "infos_of", "own_observations", "stack", "step_result"]

StepResult = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"""Observations, rewards, terminated, truncated and infos, each with one row for each environment."""


def step_result(batch: StepBatch, env_ids: Sequence[int] | NDArray[Any]) -> StepResult:
    """Returns what a step returns.

    Args:
        batch: The answers.
        env_ids: The ids as the caller wrote them, which stand in the infos.
    """
    infos = infos_of(batch)
    rewards = _rewards(batch, infos)
    for env_id, info in zip(env_ids, infos, strict=True):
        info["env_id"] = env_id
    obs = stack(own_observations(batch.obs, len(infos)))
    return obs, rewards, batch.terminated.copy(), batch.truncated.copy(), objects(infos)


def infos_of(batch: StepBatch) -> list[dict[str, Any]]:
    """Returns the info of each row."""
    by_id = {info.env_id: info.info for info in batch.info}
    return [by_id.get(env_id) or {} for env_id in batch.env_ids.tolist()]


def own_observations(obs: Tree, count: int) -> NDArray[Any] | list[Any]:
    """Returns observations in memory of their own, as one array if they are all in one, else one by one."""
    own = tree_map(np.copy, obs)
    if isinstance(own, np.ndarray) and own.dtype != object:
        return own
    return [index_tree(own, row) for row in range(count)]


def _rewards(batch: StepBatch, infos: Sequence[dict[str, Any]]) -> NDArray[np.float64]:
    """Returns rewards, ``[n]`` or, of several agents, ``[n, *rew_shape]``."""
    given = [info.pop(REWARD, None) for info in infos]
    shaped = [reward for reward in given if reward is not None]
    if not shaped:
        return batch.rew.copy()
    nothing = np.zeros_like(shaped[0])
    instead = [nothing if is_restarted(info) else rew for info, rew in zip(infos, batch.rew, strict=True)]
    return np.stack([rew if reward is None else reward for reward, rew in zip(given, instead, strict=True)])


def assembled_chunk(chunk: Chunk) -> Chunk:
    """Returns a chunk with the rewards of several agents, ``rew [T, N, *rew_shape]``, 0 where no step happened.

    Raises:
        ConfigError: Not all rewards have one shape.
    """
    if not chunk.infos.has_key(REWARD):
        return chunk
    lacking, infos, rew = chunk.valid.copy(), list[ChunkInfo](), None
    for item in chunk.infos:
        info = dict(item.info)
        reward = info.pop(REWARD, None)
        if reward is not None:
            rew = np.zeros((*lacking.shape, *reward.shape)) if rew is None else rew
            _check_shape(reward.shape, rew.shape[2:])
            rew[item.t, item.n], lacking[item.t, item.n] = reward, False
        infos.append(item._replace(info=info))
    assert rew is not None
    if lacking.any():
        _check_shape((), rew.shape[2:])
    return replace(chunk, rew=rew, infos=ChunkInfos.of(item for item in infos if item.info))


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
