"""The infos of a chunk: arrays while they travel between processes, dicts when they are read.

Some environments return an info at every step. Thousands of small dicts take longer to pickle than the steps
themselves, and most are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from rayvec.data.trees import copied, objects

__all__ = ["ChunkInfo", "ChunkInfos", "InfoBlock", "InfoColumn", "copied"]

_NUMBERS = "biufc"  # not dates and spans of time: the type of such a value does not say its unit


class ChunkInfo(NamedTuple):
    """An info dict with its place in a chunk.

    Attributes:
        t: The step, 0 to T-1; -1 for the reset before the chunk's first step.
        n: The column.
        info: The info dict as the environment returned it.
    """

    t: int
    n: int
    info: dict[str, Any]


class InfoColumn(NamedTuple):
    """The values that k infos have under one key.

    Attributes:
        kind: The type of every value, where that is a Python or NumPy number (or bool), or arrays of one shape and
            dtype; ``object`` for everything else.
        values: ``[k, ...]``; of dtype object where `kind` is.
    """

    kind: type[Any]
    values: NDArray[Any]

    @classmethod
    def of(cls, values: Sequence[Any]) -> InfoColumn:
        """Makes a column of values; reading returns values of the same types."""
        kinds = set(map(type, values))
        kind = kinds.pop() if len(kinds) == 1 else object
        if kind is np.ndarray:
            first = values[0]
            plain = first.ndim and first.dtype.kind in _NUMBERS and first.dtype.isnative
            if plain and all(value.shape == first.shape and value.dtype == first.dtype for value in values):
                return cls(kind, np.stack(values))
        elif kind in (bool, int, float) or (issubclass(kind, np.generic) and _is_number(np.dtype(kind), kind)):
            with suppress(OverflowError):  # an int of more than 64 bits
                return cls(kind, np.array(values, kind))
        return cls(object, objects(values))

    def read(self) -> Iterable[Any]:
        """Returns the values; arrays among them are copies that can be written."""
        if self.kind is object:
            return map(copied, self.values)
        return self.values.tolist() if self.kind in (bool, int, float) else iter(self.values.copy())


def _is_number(dtype: np.dtype[Any], kind: type[Any]) -> bool:
    return dtype.kind in _NUMBERS and dtype.type is kind


class InfoBlock(NamedTuple):
    """Infos that have the same keys.

    Attributes:
        t: Their steps, ``int64 [k]``.
        n: Their columns in the chunk, ``int64 [k]``.
        columns: Their values, by key.
    """

    t: NDArray[np.int64]
    n: NDArray[np.int64]
    columns: dict[Any, InfoColumn]

    def read(self) -> Iterator[ChunkInfo]:
        """Yields the infos."""
        rows = zip(*(column.read() for column in self.columns.values()), strict=True) if self.columns else repeat(())
        for t, n, row in zip(self.t.tolist(), self.n.tolist(), rows, strict=False):
            yield ChunkInfo(t, n, dict(zip(self.columns, row, strict=True)))


class ChunkInfos(Sequence[ChunkInfo]):
    """The infos of a chunk in the order of ``(t, n)``; the dicts are made when one of them is first read.

    A change to one of the dicts is seen by later readers of this object. It is not part of a pickle of the object, of
    what it is joined to or of what is cut from it.

    >>> infos = ChunkInfos.of([ChunkInfo(0, 1, {"x": 2.0}), ChunkInfo(0, 0, {"x": 1.0})])
    >>> infos[0], infos.blocks[0].columns["x"].values
    (ChunkInfo(t=0, n=0, info={'x': 1.0}), array([2., 1.]))
    """

    def __init__(self, blocks: Iterable[InfoBlock] = ()) -> None:
        self.blocks = tuple(block for block in blocks if len(block.t))

    @classmethod
    def of(cls, infos: Iterable[ChunkInfo]) -> ChunkInfos:
        """Makes arrays of infos."""
        by_keys: dict[tuple[Any, ...], list[ChunkInfo]] = {}
        for info in infos:
            by_keys.setdefault(tuple(info.info), []).append(info)
        blocks = []
        for keys, same in by_keys.items():
            t, n = np.array([info[:2] for info in same], np.int64).T
            blocks.append(InfoBlock(t, n, {key: InfoColumn.of([info.info[key] for info in same]) for key in keys}))
        return cls(blocks)

    @classmethod
    def join(cls, parts: Sequence[ChunkInfos], offsets: Sequence[int]) -> ChunkInfos:
        """Joins the infos of chunks side by side, the first column of each at its offset."""
        by_form: dict[Any, list[InfoBlock]] = {}
        for part, offset in zip(parts, offsets, strict=True):
            for t, n, columns in part.blocks:
                form = tuple((key, kind, of.dtype, of.shape[1:]) for key, (kind, of) in columns.items())
                by_form.setdefault(form, []).append(InfoBlock(t, n + offset, columns))
        joined = []
        for blocks in by_form.values():
            t, n, every = zip(*blocks, strict=True)
            columns = {
                key: InfoColumn(column.kind, np.concatenate([columns[key].values for columns in every]))
                for key, column in every[0].items()
            }
            joined.append(InfoBlock(np.concatenate(t), np.concatenate(n), columns))
        return cls(joined)

    def where(self, keep: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]) -> ChunkInfos:
        """Returns the infos at those places ``t [k]``, ``n [k]`` that a function of them marks, ``bool [k]``."""
        blocks = []
        for t, n, columns in self.blocks:
            kept = keep(t, n)
            cut = {key: InfoColumn(kind, values[kept]) for key, (kind, values) in columns.items()}
            blocks.append(InfoBlock(t[kept], n[kept], cut))
        return ChunkInfos(blocks)

    def between(self, start: int, stop: int) -> ChunkInfos:
        """Returns the infos of the columns `start` to ``stop - 1`` of the chunk, counted from there."""
        inside = self.where(lambda t, n: (n >= start) & (n < stop))
        return ChunkInfos(block._replace(n=block.n - start) for block in inside.blocks)

    @cached_property
    def _items(self) -> tuple[ChunkInfo, ...]:
        return tuple(sorted((info for block in self.blocks for info in block.read()), key=itemgetter(0, 1)))

    def __len__(self) -> int:
        return sum(len(block.t) for block in self.blocks)

    def __iter__(self) -> Iterator[ChunkInfo]:
        return iter(self._items)

    @overload
    def __getitem__(self, index: int) -> ChunkInfo: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ChunkInfo, ...]: ...
    def __getitem__(self, index: int | slice) -> ChunkInfo | tuple[ChunkInfo, ...]:
        return self._items[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items == tuple(other)

    def __repr__(self) -> str:
        return f"ChunkInfos({list(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkInfos, (self.blocks,)
