"""What chunks have in common with chunks: joined side by side, and where episodes end in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Chunk, ChunkSummary, Tree, tree_map
from rayvec.data.finite import find_bad_obs, join_bad_obs
from rayvec.data.infos import ChunkInfos

__all__ = ["counted_ends", "join_chunks", "join_summaries", "summarize"]


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Joins chunks of the same steps of different environments, side by side, in newly allocated memory."""
    offsets = np.cumsum([0, *(chunk.num_envs for chunk in chunks)]).tolist()
    final_index, order = _place(offsets, [chunk.final_index for chunk in chunks])

    def join(axis: int, trees: Sequence[Tree]) -> Tree:
        return tree_map(lambda *leaves: np.concatenate(leaves, axis=axis), *trees)

    first = chunks[0]
    return Chunk(
        env_ids=join(0, [chunk.env_ids for chunk in chunks]),
        obs=join(1, [chunk.obs for chunk in chunks]),
        act=join(1, [chunk.act for chunk in chunks]),
        rew=join(1, [chunk.rew for chunk in chunks]),
        terminated=join(1, [chunk.terminated for chunk in chunks]),
        truncated=join(1, [chunk.truncated for chunk in chunks]),
        valid=join(1, [chunk.valid for chunk in chunks]),
        last_obs=join(0, [chunk.last_obs for chunk in chunks]),
        final_index=final_index,
        final_obs=tree_map(lambda leaf: leaf[order], join(0, [chunk.final_obs for chunk in chunks])),
        extras={name: join(1, [chunk.extras[name] for chunk in chunks]) for name in first.extras},
        infos=ChunkInfos.join([chunk.infos for chunk in chunks], offsets[:-1]),
        reset_infos=ChunkInfos.join([chunk.reset_infos for chunk in chunks], offsets[:-1]),
        restarts=_place(offsets, [chunk.restarts for chunk in chunks])[0],
        cuts=_place(offsets, [chunk.cuts for chunk in chunks])[0],
        weights_version=min(chunk.weights_version for chunk in chunks),
        first_step=first.first_step,
    )


def _place(offsets: Sequence[int], places: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Joins places ``(t, n)`` of chunks side by side, in order; returns also where each came from."""
    joined = np.concatenate([at + np.array([0, offset]) for at, offset in zip(places, offsets, strict=False)])
    order = np.lexsort((joined[:, 1], joined[:, 0]))
    return joined[order], order


def counted_ends(chunk: Chunk) -> NDArray[np.bool_]:
    """Returns where an episode ended by itself, ``bool [T, N]``: not one that a fault has cut."""
    ended: NDArray[np.bool_] = chunk.done & chunk.valid
    ended[tuple(chunk.cuts.T)] = False
    return ended


def summarize(chunk: Chunk) -> ChunkSummary:
    """Returns the summary of a chunk; arrays are shared with it."""
    return ChunkSummary(
        env_ids=chunk.env_ids,
        rew=chunk.rew,
        terminated=chunk.terminated,
        truncated=chunk.truncated,
        valid=chunk.valid,
        ended=counted_ends(chunk),
        final_index=chunk.final_index,
        restarts=chunk.restarts,
        last_obs=chunk.last_obs,
        weights_version=chunk.weights_version,
        first_step=chunk.first_step,
        bad_obs=find_bad_obs(chunk),
    )


def join_summaries(parts: Sequence[ChunkSummary]) -> ChunkSummary:
    """Joins the summaries of chunks that :func:`join_chunks` would join."""
    offsets = np.cumsum([0, *(part.rew.shape[1] for part in parts)]).tolist()

    def join(name: str, axis: int = 1) -> Tree:
        trees = [getattr(part, name) for part in parts]
        return tree_map(lambda *leaves: np.concatenate(leaves, axis=axis), *trees)

    final_index, order = _place(offsets, [part.final_index for part in parts])
    return ChunkSummary(
        env_ids=join("env_ids", 0),
        **{name: join(name) for name in ("rew", "terminated", "truncated", "valid", "ended")},
        final_index=final_index,
        restarts=_place(offsets, [part.restarts for part in parts])[0],
        last_obs=join("last_obs", 0),
        weights_version=min(part.weights_version for part in parts),
        first_step=parts[0].first_step,
        bad_obs=join_bad_obs(parts, order),
    )
