"""Which rank gets which environments of a batch. Nothing here imports Ray: the caller passes `fetch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from rayvec.data import Batch, Chunk, ChunkRef
from rayvec.data.join_chunks import join_chunks
from rayvec.data.topology import even_bounds

__all__ = ["ChunkPart", "RemoteShard", "fetch_shard", "overlap", "split_batch", "split_refs"]


ChunkPart: TypeAlias = tuple[Any, int, int]
"""Some environments of a chunk in the object store: a reference to it, the first of them, and one after the last."""


class RemoteShard(NamedTuple):
    """A rank's environments of a batch whose chunks lie in the object store.

    Attributes:
        parts: For every chunk in time, what to fetch and join.
        stats: Those of the batch.
    """

    parts: tuple[tuple[ChunkPart, ...], ...]
    stats: Any


def split_batch(batch: Batch, num_ranks: int) -> list[Batch]:
    """Divides the environments of a batch, ascending with rank, as evenly as possible; a rank may get none."""
    bounds = pairwise(even_bounds(batch.chunks[0].num_envs, num_ranks))
    return [replace(batch, chunks=tuple(chunk.columns(*each) for chunk in batch.chunks)) for each in bounds]


def split_refs(batch: Batch, num_ranks: int) -> list[RemoteShard]:
    """Divides a batch in the object store as `split_batch` does; each rank gets the references that it needs."""
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
    >>> overlap(refs, 2, 5)
    (('a', 2, 3), ('b', 0, 2))
    """
    parts, first = [], 0
    for ref in refs:
        width = len(ref.env_ids)
        low, high = max(start - first, 0), min(stop - first, width)
        if low < high:
            parts.append((ref.ref, low, high))
        first += width
    return tuple(parts) or ((refs[0].ref, 0, 0),)


def fetch_shard(shard: RemoteShard, fetch: Callable[[Any], Chunk]) -> Batch:
    """Returns a rank's environments as a batch; `fetch` returns a chunk by its reference."""
    chunks = [join_chunks([fetch(ref).columns(start, stop) for ref, start, stop in parts]) for parts in shard.parts]
    return Batch(tuple(chunks), shard.stats)
