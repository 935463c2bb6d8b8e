"""The infos of a chunk: columns while they travel between processes, dicts when they are read.

Some environments return an info at every step. Thousands of small dicts take longer to pickle than the steps
themselves, and most are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data.columns import Columns, columns_of, info_of, merge, select
from rayvec.data.trees import copied

__all__ = ["ChunkInfo", "ChunkInfos"]


class ChunkInfo(NamedTuple):
    """An info dict with its place in a chunk.

    Attributes:
        t: The step, 0 to T-1; -1 for the reset before the chunk's first step.
        n: The column.
        info: The info dict. Numbers are Python's own where columns do not tell them from NumPy's.
    """

    t: int
    n: int
    info: dict[str, Any]


class ChunkInfos(Sequence[ChunkInfo]):
    """The infos of a chunk in the order of ``(t, n)``; the dicts are made when one of them is first read.

    A change to one of the dicts is seen by later readers of this object. It is not part of a pickle of the object, of
    what it is joined to or of what is cut from it.

    >>> infos = ChunkInfos.of([ChunkInfo(0, 0, {"x": 1.0}), ChunkInfo(0, 1, {"x": 2.0})])
    >>> infos[0], infos.columns["x"]
    (ChunkInfo(t=0, n=0, info={'x': 1.0}), array([1., 2.]))

    Args:
        places: ``(t, n)`` of each info, ``int64 [k, 2]``.
        columns: The infos, with a row for each place.
    """

    def __init__(self, places: Any = (), columns: Columns | None = None) -> None:
        self.places: NDArray[np.int64] = np.asarray(places, np.int64).reshape(-1, 2)
        self.columns = columns or {}

    @classmethod
    def of(cls, infos: Iterable[ChunkInfo]) -> ChunkInfos:
        """Makes columns of infos that are in order."""
        each = list(infos)
        return cls([info[:2] for info in each], columns_of(enumerate(info.info for info in each), len(each)))

    @classmethod
    def join(cls, parts: Sequence[ChunkInfos], offsets: Sequence[int]) -> ChunkInfos:
        """Joins the infos of chunks side by side, the first column of each at its offset."""
        places = [part.places + np.array([0, offset]) for part, offset in zip(parts, offsets, strict=True)]
        bounds = pairwise(accumulate(map(len, parts), initial=0))
        rows = [(slice(*each), part.columns) for each, part in zip(bounds, parts, strict=True) if len(part)]
        joined = np.concatenate(places)
        order = np.lexsort(joined.T[::-1])
        return cls(joined[order], select(merge(rows, len(joined)), order) if rows else {})

    def where(self, keep: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]) -> ChunkInfos:
        """Returns the infos at those places ``t [k]``, ``n [k]`` that a function of them marks, ``bool [k]``."""
        kept = keep(*self.places.T)
        return ChunkInfos(self.places[kept], select(self.columns, kept))

    def between(self, start: int, stop: int) -> ChunkInfos:
        """Returns the infos of the columns `start` to ``stop - 1`` of the chunk, counted from there."""
        inside = self.where(lambda t, n: (n >= start) & (n < stop))
        return ChunkInfos(inside.places - np.array([0, start]), inside.columns)

    @cached_property
    def _items(self) -> tuple[ChunkInfo, ...]:
        infos = (info_of(self.columns, row) for row in range(len(self)))
        return tuple(
            ChunkInfo(t, n, {key: copied(value) for key, value in info.items()})
            for (t, n), info in zip(self.places.tolist(), infos, strict=True)
        )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items == tuple(other)

    def __repr__(self) -> str:
        return f"ChunkInfos({list(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkInfos, (self.places, self.columns)
