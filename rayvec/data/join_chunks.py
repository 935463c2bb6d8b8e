"""Chunks of different environments joined side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, tree_map
from rayvec.data.chunk import AXES
from rayvec.data.infos import ChunkInfos
from rayvec.errors import ConfigError

__all__ = ["check_extras", "counted_ends", "join_chunks", "pad_chunk"]


def join_chunks(chunks: Sequence[Chunk], *, copy: bool = True) -> Chunk:
    """Joins chunks of different environments, side by side.

    Where their numbers of steps differ, the shorter ones are padded: see :func:`pad_chunk`.

    Args:
        chunks: The chunks.
        copy: Whether the result has memory of its own. Otherwise arrays of steps whose columns lie side by side already
            are not copied.

    Raises:
        ConfigError: The policy returned different extras in them.
    """
    num_steps = max(chunk.num_steps for chunk in chunks)
    first, *following = [{name: extra.shape[2:] for name, extra in chunk.extras.items()} for chunk in chunks]
    for found, chunk in zip(following, chunks[1:], strict=True):
        where, there = (" ".join(map(str, each.env_ids[:1])) for each in (chunks[0], chunk))
        check_extras(first, found, f"for environment {where}", f" for environment {there}")
    return Chunk(**_joined([pad_chunk(chunk, num_steps) for chunk in chunks], copy=copy))


def check_extras(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: str, there: str = ""
) -> None:
    """Raises ``ConfigError`` if a policy returned other extras than at an earlier step or in another worker.

    Args:
        expected: Shape of a row of each extra, by name.
        found: The same, of what is checked.
        where: Where `expected` was returned, for the message.
        there: Where `found` was returned.
    """
    if found != expected:
        raise ConfigError(
            f"The policy returned extras of the shapes {found}{there}, and of {expected} {where}. Return every "
            "extra in one shape at every step; fill in zeros where there is none."
        )


def pad_chunk(chunk: Chunk, num_steps: int) -> Chunk:
    """Returns a chunk of `num_steps` steps, of which those beyond the chunk's own did not happen.

    They are not `valid`, and their observation is `last_obs`: what follows the last step that happened. The episode
    goes on in the next chunk.
    """
    if num_steps == chunk.num_steps:
        return chunk
    count = num_steps - chunk.num_steps

    def pad(leaf: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([leaf, np.zeros((count, *leaf.shape[1:]), leaf.dtype)])

    def pad_obs(leaf: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([leaf, np.broadcast_to(last, (count, *last.shape))])

    padded = {name: tree_map(pad, getattr(chunk, name)) for name, axes in AXES.items() if axes == "T, N"}
    return replace(chunk, **{**padded, "obs": tree_map(pad_obs, chunk.obs, chunk.last_obs)})


def _joined(parts: Sequence[Chunk], *, copy: bool = True) -> dict[str, Any]:
    """Joins the fields of chunks, each along its axes."""
    offsets = [0, *accumulate(len(part.env_ids) for part in parts)]
    finals, order = _in_order([part.final_index for part in parts], offsets)
    join: dict[str, Callable[[list[Any]], Any]] = {
        "T, N": lambda trees: tree_map(partial(_beside, copy=copy), *trees),
        "K, N": _join_states,
        "N": lambda trees: tree_map(lambda *leaves: np.concatenate(leaves), *trees),
        "(t, n)": lambda places: _in_order(places, offsets)[0],
        "F": lambda trees: tree_map(lambda *leaves: np.concatenate(leaves)[order], *trees),
        "infos": lambda infos: ChunkInfos.join(infos, offsets[:-1]),
        "": min,
    }
    joined = {name: join[axes]([getattr(part, name) for part in parts]) for name, axes in AXES.items()}
    return {**joined, "final_index": finals}


def _beside(*leaves: NDArray[Any], copy: bool) -> NDArray[Any]:
    """Joins arrays ``[T, n, ...]``. Columns of one array that lie side by side are a view of it, unless `copy`."""
    first, row_bytes = leaves[0], leaves[0].strides[1]
    starts = accumulate((leaf.shape[1] * row_bytes for leaf in leaves), initial=first.ctypes.data)
    width = sum(leaf.shape[1] for leaf in leaves)
    is_whole = first.strides[0] == width * row_bytes and all(
        (leaf.ctypes.data, leaf.strides, leaf.dtype) == (start, first.strides, first.dtype)
        for leaf, start in zip(leaves, starts, strict=False)
    )
    if copy or not is_whole:
        return np.concatenate(leaves, axis=1)
    return np.lib.stride_tricks.as_strided(first, (len(first), width, *first.shape[2:]), first.strides)


def _join_states(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Joins states side by side. Where a chunk took fewer steps than others, sequences without a step begin with 0."""
    count = max(map(len, parts))
    missing = [np.zeros((count - len(part), *part.shape[1:]), np.float32) for part in parts]
    return np.concatenate([np.concatenate(pair) for pair in zip(parts, missing, strict=True)], axis=1)


def _in_order(
    places: Sequence[NDArray[np.int64]], offsets: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Joins places ``(t, n)`` of chunks side by side, in order; returns also where each came from."""
    joined = np.concatenate(places)
    joined[:, 1] += np.repeat(offsets[:-1], [len(at) for at in places])
    order = np.argsort(joined[:, 0] * offsets[-1] + joined[:, 1], kind="stable")  # fast where parts are in order
    return joined[order], order


def counted_ends(chunk: Chunk) -> NDArray[np.bool_]:
    """Returns where an episode ended by itself, ``bool [T, N]``: not one that a fault has cut."""
    ended: NDArray[np.bool_] = (chunk.terminated | chunk.truncated) & chunk.valid
    ended[tuple(chunk.cuts.T)] = False
    return ended
