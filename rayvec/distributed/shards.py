"""Which rank gets which columns of a batch. Nothing here imports Ray: `fetch` is given what does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayvec.data import Batch, Chunk, ChunkRef
from rayvec.data.chunk_ops import join_chunks
from rayvec.data.partition import even_bounds

__all__ = ["ChunkPart", "RemoteShard", "fetch_shard", "split_batch", "split_refs"]


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Columns of a chunk that was left in the object store.

    Attributes:
        ref: Where it lies.
        start: The first of these columns among those that lie there.
        stop: One after the last.
    """

    ref: Any
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """A rank's columns of a batch whose chunks were left in the object store.

    Attributes:
        parts: For every chunk in time, what to fetch and put side by side.
        stats: Those of the batch.
    """

    parts: tuple[tuple[ChunkPart, ...], ...]
    stats: Any


def split_batch(batch: Batch, num_ranks: int) -> list[Batch]:
    """Divides a batch by columns, ascending with rank, as evenly as possible; a rank may get none.

    Every rank gets arrays of its own, since a range of columns is scattered in memory.
    """
    bounds = even_bounds(batch.chunks[0].num_envs, num_ranks)

    def shard(rank: int) -> Batch:
        start, stop = bounds[rank : rank + 2]
        return replace(batch, chunks=tuple(join_chunks([chunk.columns(start, stop)]) for chunk in batch.chunks))

    return [batch] if num_ranks == 1 else [shard(rank) for rank in range(num_ranks)]


def split_refs(batch: Batch, num_ranks: int) -> list[RemoteShard]:
    """Divides a batch in the object store as `split_batch` does; each rank is told only of what it needs."""
    bounds = even_bounds(sum(len(ref.env_ids) for ref in batch.chunk_refs[0]), num_ranks)
    return [
        RemoteShard(tuple(overlap(refs, *bounds[rank : rank + 2]) for refs in batch.chunk_refs), batch.stats)
        for rank in range(num_ranks)
    ]


def overlap(refs: Sequence[ChunkRef], start: int, stop: int) -> tuple[ChunkPart, ...]:
    """Returns what the columns `start` to ``stop - 1`` take of chunks that lie side by side.

    Where there is none, no columns of the first chunk are returned, since its arrays have shapes and dtypes.

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
    """Returns a rank's columns as a batch; `fetch` gets a chunk by its reference."""
    chunks = [join_chunks([fetch(part.ref).columns(part.start, part.stop) for part in parts]) for parts in shard.parts]
    return Batch(tuple(chunks), shard.stats)
