"""Turns answers into the arrays that Tianshou would have made of what environments returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkInfo, Tree, objects, tree_map
from rayvec.data.columns import unwrapped
from rayvec.data.layouts import index_tree

__all__ = ["StepResult", "chunk_infos", "observations", "step_result"]

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
    for env_id, info in zip(env_ids, infos, strict=True):
        info["env_id"] = env_id
    obs = observations(arrays, rows, len(infos))
    rew, terminated, truncated = (arrays[name][rows].copy() for name in ("rew", "terminated", "truncated"))
    return obs, rew, terminated, truncated, objects(infos)


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


def chunk_infos(chunk: Chunk) -> list[ChunkInfo]:
    """Returns the infos of a chunk's steps that are not empty, as the environments returned them."""
    infos = [item._replace(info=unwrapped(dict(item.info))) for item in chunk.infos]
    return [item for item in infos if item.info]
