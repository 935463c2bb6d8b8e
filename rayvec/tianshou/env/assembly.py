"""Turns a pool's answers into the arrays that Tianshou would have made of what environments returned.

The counterpart of :mod:`rayvec.tianshou.env.pool_env`: values that were sent apart from the arrays are put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkInfo, ChunkInfos, StepBatch, objects, tree_map
from rayvec.errors import ConfigError
from rayvec.pools.restart_state import is_restarted
from rayvec.pools.shared_memory import index_tree
from rayvec.tianshou.env.pool_env import APART, FLOAT

__all__ = ["Assembler", "StepResult", "assembled_chunk"]

StepResult = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"""Observations, rewards, terminated, truncated and infos, each with one row for each environment."""


class Assembler:
    """Makes Tianshou's arrays of a pool's answers, and keeps what it needs of earlier answers."""

    def __init__(self) -> None:
        self._obs_apart: dict[int, Any] = {}
        self._rew_chars: dict[int, str] = {}

    @property
    def any_apart(self) -> bool:
        """Whether the last observation of some environment did not fit into the arrays."""
        return bool(self._obs_apart)

    def reset(self, batch: StepBatch) -> tuple[NDArray[Any] | list[Any], list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns observations, infos, and what was sent apart, one for each environment, not stacked."""
        for env_id in batch.env_ids.tolist():
            self._rew_chars.pop(env_id, None)
        infos, apart = _split(batch)
        return self._observations(batch, infos, apart), infos, apart

    def step(self, batch: StepBatch, env_ids: Sequence[int] | NDArray[Any]) -> StepResult:
        """Returns what a step returns.

        Args:
            batch: The answers.
            env_ids: The ids as the caller wrote them, which stand in the infos.
        """
        infos, apart = _split(batch)
        rewards = self._rewards(batch, infos, apart)
        obs = stack(self._observations(batch, infos, apart))
        for env_id, info in zip(env_ids, infos, strict=True):
            info["env_id"] = env_id
        return obs, rewards, batch.terminated.copy(), batch.truncated.copy(), objects(infos)

    def _observations(
        self, batch: StepBatch, infos: Sequence[dict[str, Any]], apart: Sequence[dict[str, Any]]
    ) -> NDArray[Any] | list[Any]:
        """Returns observations in memory of their own, as one array if they are all in one, else one by one."""
        env_ids = batch.env_ids.tolist()
        for env_id, info, extra in zip(env_ids, infos, apart, strict=True):
            if "obs" in extra:
                self._obs_apart[env_id] = extra["obs"]
            elif not is_restarted(info):  # after a restart it is the last true one, which may have been sent apart
                self._obs_apart.pop(env_id, None)
        obs = tree_map(np.copy, batch.obs)
        if isinstance(obs, np.ndarray) and obs.dtype != object and not self._obs_apart:
            return obs
        return [
            self._obs_apart[env_id] if env_id in self._obs_apart else index_tree(obs, row)
            for row, env_id in enumerate(env_ids)
        ]

    def _rewards(
        self, batch: StepBatch, infos: Sequence[dict[str, Any]], apart: Sequence[dict[str, Any]]
    ) -> NDArray[Any]:
        """Returns rewards with the data type of ``np.stack`` over what the environments returned."""
        if not (batch.info or self._rew_chars):
            return batch.rew.copy()
        env_ids = batch.env_ids.tolist()
        for env_id, info, extra in zip(env_ids, infos, apart, strict=True):
            if "rew_char" in extra:
                self._rew_chars[env_id] = extra["rew_char"]
            elif is_restarted(info):
                self._rew_chars.pop(env_id, None)
        dtypes = [np.dtype(self._rew_chars.get(env_id, FLOAT)) for env_id in env_ids]
        if any("rew" in extra for extra in apart):
            rows = zip(batch.rew, dtypes, infos, apart, strict=True)
            nothing = np.zeros_like(next(extra["rew"] for extra in apart if "rew" in extra))
            return np.stack(
                [
                    extra.get("rew", nothing if is_restarted(info) else dtype.type(rew))
                    for rew, dtype, info, extra in rows
                ]
            )
        return batch.rew.astype(np.result_type(*dtypes))


def assembled_chunk(chunk: Chunk) -> Chunk:
    """Returns a chunk with the rewards of several agents put back, and infos without what was sent apart.

    Rewards that are arrays become ``rew [T, N, *rew_shape]``, 0 where no step happened.

    Raises:
        ConfigError: An observation did not fit into the chunk's arrays, or not all rewards have one shape.
    """
    if not (chunk.infos.has_key(APART) or chunk.reset_infos.has_key(APART)):
        return chunk
    rewards: list[tuple[int, int, Any]] = []
    infos = [_without_apart(item, rewards) for item in chunk.infos]
    reset_infos = [_without_apart(item, rewards) for item in chunk.reset_infos]
    return replace(
        chunk,
        rew=_rewards_apart(chunk, rewards) if rewards else chunk.rew,
        infos=ChunkInfos.of(item for item in infos if item.info),
        reset_infos=ChunkInfos.of(item for item in reset_infos if item.info),
    )


def _without_apart(item: ChunkInfo, rewards: list[tuple[int, int, Any]]) -> ChunkInfo:
    info = dict(item.info)
    apart = info.pop(APART, {})
    if "obs" in apart:
        raise _chunk_error("observations of the space's shape and data type", apart["obs"])
    if "rew" in apart:
        rewards.append((item.t, item.n, apart["rew"]))
    return item._replace(info=info)


def _rewards_apart(chunk: Chunk, rewards: list[tuple[int, int, Any]]) -> NDArray[np.float64]:
    """Returns all rewards of a chunk: arrays, or numbers of which some are no exact ``float64``."""
    shape = np.shape(rewards[0][2])
    rew = np.zeros((*chunk.rew.shape, *shape)) if shape else chunk.rew.copy()
    lacking = chunk.valid & bool(shape)
    for t, n, reward in rewards:
        if np.shape(reward) != shape or np.asarray(reward).dtype.kind not in "biuf":
            raise _chunk_error(f"rewards that are all numbers of the shape {shape}", reward)
        rew[t, n], lacking[t, n] = reward, False
    if lacking.any():
        t, n = np.argwhere(lacking)[0]
        raise _chunk_error(f"rewards that are all numbers of the shape {shape}", float(chunk.rew[t, n]))
    return rew


def _chunk_error(expected: str, got: Any) -> ConfigError:
    return ConfigError(
        "Chunks hold observations of the space's shape and data type, and rewards of one shape.",
        expected=expected,
        got=repr(got),
        remedy="Correct the environment's space or its rewards; inference='driver' takes observations of any kind.",
    )


def _split(batch: StepBatch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns, for each row, the info of the environment, and what was sent apart."""
    by_id = {info.env_id: info.info for info in batch.info}
    infos = [by_id.get(env_id) or {} for env_id in batch.env_ids.tolist()]
    return infos, [info.pop(APART, {}) for info in infos]


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
