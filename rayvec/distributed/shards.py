"""Which rank gets which environments of a batch. Nothing here imports Ray: the caller passes `fetch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rayvec.data import Batch, Chunk, ChunkRef
from rayvec.data.join_chunks import join_chunks
from rayvec.data.topology import even_bounds

__all__ = ["ChunkPart", "RemoteShard", "copy_batch", "cut_batch", "fetch_shard", "rank_bounds", "split_refs"]


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Some environments of a chunk in the object store.

    Attributes:
        ref: Reference to the chunk.
        start: The first of these environments among those of the chunk.
        stop: One after the last.
    """

    ref: Any
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """A rank's environments of a batch whose chunks lie in the object store.

    Attributes:
        parts: For every chunk in time, what to fetch and join.
        stats: Those of the batch.
    """

    parts: tuple[tuple[ChunkPart, ...], ...]
    stats: Any


def rank_bounds(batch: Batch, num_ranks: int) -> list[tuple[int, int]]:
    """Divides the environments of a batch, ascending with rank, as evenly as possible; a rank may get none."""
    return list(pairwise(even_bounds(batch.chunks[0].num_envs, num_ranks)))


def cut_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Returns the environments `start` to ``stop - 1`` of a batch; its arrays are views."""
    return replace(batch, chunks=tuple(chunk.columns(start, stop) for chunk in batch.chunks))


def copy_batch(batch: Batch) -> Batch:
    """Returns a batch whose arrays lie in one piece each: those of a range of environments are scattered in memory."""
    return replace(batch, chunks=tuple(join_chunks([chunk]) for chunk in batch.chunks))


def split_refs(batch: Batch, num_ranks: int) -> list[RemoteShard]:
    """Divides a batch in the object store as `rank_bounds` does; each rank gets the references that it needs."""
    bounds = even_bounds(sum(len(ref.env_ids) for ref in batch.chunk_refs[0]), num_ranks)
    return [
        RemoteShard(tuple(overlap(refs, *bounds[rank : rank + 2]) for refs in batch.chunk_refs), batch.stats)
        for rank in range(num_ranks)
    ]


def overlap(refs: Sequence[ChunkRef], start: int, stop: int) -> tuple[ChunkPart, ...]:
    """Returns the parts of joined chunks that hold the environments `start` to ``stop - 1``.

    Where there is none, the result is an empty part of the first chunk, since its arrays have shapes and dtypes.

    >>> import numpy as np
    >>> refs = [ChunkRef(np.arange(3), 8, "a"), ChunkRef(np.arange(3, 7), 8, "b")]
    >>> [(part.ref, part.start, part.stop) for part in overlap(refs, 2, 5)]
    [('a', 2, 3), ('b', 0, 2)]
    """
    parts, first = [], 0
    for ref in refs:
        width = len(ref.env_ids)
        low, high = max(start - first, 0), min(stop - first, width)
        if low < high:
            parts.append(ChunkPart(ref.ref, low, high))
        first += width
    return tuple(parts) or (ChunkPart(refs[0].ref, 0, 0),)


def fetch_shard(shard: RemoteShard, fetch: Callable[[Any], Chunk]) -> Batch:
    """Returns a rank's environments as a batch; `fetch` returns a chunk by its reference."""
    chunks = [join_chunks([fetch(part.ref).columns(part.start, part.stop) for part in parts]) for parts in shard.parts]
    return Batch(tuple(chunks), shard.stats)
