"""The infos of a chunk: by columns while they travel, dicts for whoever reads them.

Some environments have something to say at every step. Thousands of small dicts cost more to pickle than the steps
that they tell of, and most are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChunkInfo", "ChunkInfos", "InfoBlock", "InfoColumn"]

_NUMBERS = "biufc"  # a span of time has a unit of its own besides


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


@dataclass(frozen=True, slots=True)
class InfoColumn:
    """What k infos hold under one key.

    Attributes:
        kind: The type of every value, where that is a Python or NumPy number (or bool), or an array of one shape and
            dtype; None for everything else.
        values: An array ``[k, ...]``, or for everything else a list.
    """

    kind: type[Any] | None
    values: Any

    @classmethod
    def of(cls, values: list[Any]) -> InfoColumn:
        """Makes a column of values; they come back with the same types."""
        kinds = set(map(type, values))
        kind = kinds.pop()
        if not kinds and kind is np.ndarray:
            first = values[0]
            if first.ndim and first.dtype.kind in _NUMBERS and first.dtype.isnative:
                if all(value.shape == first.shape and value.dtype == first.dtype for value in values):
                    return cls(kind, np.stack(values))
        elif not kinds and _is_number(kind):
            try:
                return cls(kind, np.array(values, kind))
            except OverflowError:  # an int beyond 64 bits
                pass
        return cls(None, values)

    @property
    def form(self) -> Any:
        """Equal for columns that can be joined."""
        return None if self.kind is None else (self.kind, self.values.dtype, self.values.shape[1:])

    def read(self) -> Iterable[Any]:
        """Returns the values; arrays can be written."""
        if self.kind is None:
            return map(_own, self.values)
        if self.kind in (bool, int, float):
            values: list[Any] = self.values.tolist()
            return values
        return self.values.copy()  # type: ignore[no-any-return]

    def where(self, mask: NDArray[np.bool_]) -> InfoColumn:
        """Returns the column of some of the infos, ``bool [k]``."""
        if self.kind is not None:
            return InfoColumn(self.kind, self.values[mask])
        return InfoColumn(None, [self.values[i] for i in np.flatnonzero(mask).tolist()])

    @classmethod
    def join(cls, columns: Sequence[InfoColumn]) -> InfoColumn:
        """Appends columns of one form."""
        if columns[0].kind is None:
            return cls(None, [value for column in columns for value in column.values])
        return cls(columns[0].kind, np.concatenate([column.values for column in columns]))


@dataclass(frozen=True, slots=True)
class InfoBlock:
    """Infos that have the same keys.

    Attributes:
        t: Their steps, ``int64 [k]``.
        n: Their columns in the chunk, ``int64 [k]``.
        columns: Their values, by key.
    """

    t: NDArray[np.int64]
    n: NDArray[np.int64]
    columns: dict[Any, InfoColumn]

    @classmethod
    def of(cls, keys: tuple[Any, ...], infos: Sequence[ChunkInfo]) -> InfoBlock:
        """Makes a block of infos with these keys."""
        places = np.array([info[:2] for info in infos], np.int64)
        columns = {key: InfoColumn.of([info.info[key] for info in infos]) for key in keys}
        return cls(places[:, 0], places[:, 1], columns)

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for blocks that can be joined."""
        return tuple((key, column.form) for key, column in self.columns.items())

    def read(self) -> Iterator[ChunkInfo]:
        """Yields the infos."""
        keys = list(self.columns)
        rows = zip(*(column.read() for column in self.columns.values()), strict=True) if keys else repeat(())
        for t, n, row in zip(self.t.tolist(), self.n.tolist(), rows, strict=False):
            yield ChunkInfo(t, n, dict(zip(keys, row, strict=True)))

    def where(self, mask: NDArray[np.bool_]) -> InfoBlock:
        """Returns the block of some of the infos, ``bool [k]``."""
        return InfoBlock(self.t[mask], self.n[mask], {key: column.where(mask) for key, column in self.columns.items()})

    def moved(self, offset: int) -> InfoBlock:
        """Returns the same, so many columns of the chunk to the right."""
        return InfoBlock(self.t, self.n + offset, self.columns)

    @classmethod
    def join(cls, blocks: Sequence[InfoBlock]) -> InfoBlock:
        """Appends blocks of one form."""
        return cls(
            np.concatenate([block.t for block in blocks]),
            np.concatenate([block.n for block in blocks]),
            {key: InfoColumn.join([block.columns[key] for block in blocks]) for key in blocks[0].columns},
        )


class ChunkInfos(Sequence[ChunkInfo]):
    """The infos of a chunk in the order of ``(t, n)``; the dicts are made when somebody first reads one.

    What a reader changes in them, later readers of this object see; a part of it, a pickle of it and what it is joined
    to are made from the columns, which nobody changes.

    >>> infos = ChunkInfos.of([ChunkInfo(0, 1, {"x": 2.0}), ChunkInfo(0, 0, {"x": 1.0})])
    >>> infos[0], infos.blocks[0].columns["x"].values
    (ChunkInfo(t=0, n=0, info={'x': 1.0}), array([2., 1.]))
    """

    def __init__(self, blocks: Iterable[InfoBlock] = ()) -> None:
        self.blocks = tuple(block for block in blocks if len(block.t))
        self._read: tuple[ChunkInfo, ...] | None = None

    @classmethod
    def of(cls, infos: Iterable[ChunkInfo]) -> ChunkInfos:
        """Makes columns of infos, unless they are columns already."""
        if isinstance(infos, ChunkInfos):
            return infos
        by_keys: dict[tuple[Any, ...], list[ChunkInfo]] = {}
        for info in infos:
            by_keys.setdefault(tuple(info.info), []).append(info)
        return cls(InfoBlock.of(keys, same) for keys, same in by_keys.items())

    @classmethod
    def join(cls, parts: Sequence[ChunkInfos], offsets: Sequence[int]) -> ChunkInfos:
        """Joins the infos of chunks side by side, the first column of each at its offset."""
        by_form: dict[tuple[Any, ...], list[InfoBlock]] = {}
        for part, offset in zip(parts, offsets, strict=True):
            for block in part.blocks:
                by_form.setdefault(block.form, []).append(block.moved(offset))
        return cls(map(InfoBlock.join, by_form.values()))

    def where(self, keep: Callable[[InfoBlock], NDArray[np.bool_]]) -> ChunkInfos:
        """Returns those infos of each block that a function of the block marks, ``bool [k]``."""
        return ChunkInfos(block.where(keep(block)) for block in self.blocks)

    def between(self, start: int, stop: int) -> ChunkInfos:
        """Returns the infos of the columns `start` to ``stop - 1`` of the chunk, counted from there."""
        inside = self.where(lambda block: (block.n >= start) & (block.n < stop))
        return ChunkInfos(block.moved(-start) for block in inside.blocks)

    def has_key(self, key: Any) -> bool:
        """Whether some info has a key."""
        return any(key in block.columns for block in self.blocks)

    def _items(self) -> tuple[ChunkInfo, ...]:
        if self._read is None:
            items = [info for block in self.blocks for info in block.read()]
            self._read = tuple(sorted(items, key=itemgetter(0, 1)))
        return self._read

    def __len__(self) -> int:
        return sum(len(block.t) for block in self.blocks)

    def __iter__(self) -> Iterator[ChunkInfo]:
        return iter(self._items())

    @overload
    def __getitem__(self, index: int) -> ChunkInfo: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ChunkInfo, ...]: ...
    def __getitem__(self, index: int | slice) -> ChunkInfo | tuple[ChunkInfo, ...]:
        return self._items()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items() == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkInfos({list(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkInfos, (self.blocks,)


def _is_number(kind: type[Any]) -> bool:
    """Whether NumPy's arrays give back values of exactly this type."""
    if kind in (bool, int, float):
        return True
    dtype = np.dtype(kind) if issubclass(kind, (np.bool_, np.number)) else None
    return dtype is not None and dtype.type is kind and dtype.kind in _NUMBERS


def _own(value: Any) -> Any:
    """Copies what an info holds, with the arrays wherever they are in it: as they come by Ray they can't be written."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.copy()
    return deepcopy(value)
