"""The infos of native sub-batches: columns with a row for each environment, as a vector environment returns them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.columns import PLAIN, is_mask, mask_of, plain
from rayvec.data.infos import InfoBlock, InfoColumn
from rayvec.data.trees import objects

__all__ = ["info_blocks", "merge_reset"]

Columns = dict[str, Any]


def _rows(value: Any, count: int) -> NDArray[Any]:
    """Returns an array with a row for each environment; a value that has no rows stands in each of them."""
    if isinstance(value, np.ndarray) and value.shape[:1] == (count,):
        return value
    if isinstance(value, (list, tuple)) and len(value) == count:
        return objects(value)
    return objects([value] * count)


def info_blocks(t: int, first: int, columns: Columns, among: NDArray[np.bool_]) -> Iterator[InfoBlock]:
    """Yields the infos of one step of a sub-batch as blocks of a chunk, one for each set of keys that infos have.

    Args:
        t: The step.
        first: The chunk's column of the sub-batch's first environment.
        columns: Its infos.
        among: Whose infos, ``bool [num_envs]``.
    """
    count = len(among)
    keys = [key for key in columns if not is_mask(key, columns)]
    if not keys:
        return
    masks = np.stack([mask_of(key, columns, count) & among for key in keys])
    patterns = masks[:, :1].T if (masks == masks[:, :1]).all() else np.unique(masks.T, axis=0)
    for pattern in patterns:
        if pattern.any():
            rows = np.flatnonzero((masks == pattern[:, None]).all(0))
            named = {key: _column(columns[key], rows, count) for key, has in zip(keys, pattern, strict=True) if has}
            yield InfoBlock(np.full(len(rows), t, np.int64), first + rows, named)


def _column(value: Any, rows: NDArray[np.int64], count: int) -> InfoColumn:
    """Returns the column of some environments; dicts are made of nested columns, one for each of them."""
    if type(value) is dict:
        return InfoColumn(object, objects(_dicts(value, rows, count)))
    column = _rows(value, count)[rows]
    if column.dtype.hasobject or column.dtype.kind not in "biufc":
        return InfoColumn(object, column.astype(object))
    return InfoColumn(PLAIN.get(column.dtype.type, column.dtype.type) if column.ndim == 1 else np.ndarray, column)


def _dicts(columns: Columns, rows: NDArray[np.int64], count: int) -> list[Columns]:
    """Returns the dicts of some environments, from nested columns."""
    dicts: list[Columns] = [{} for _ in rows]
    for key, value in columns.items():
        if not is_mask(key, columns):
            values = _dicts(value, rows, count) if type(value) is dict else plain(_rows(value, count)[rows])
            for each, item, has in zip(dicts, values, mask_of(key, columns, count)[rows], strict=True):
                if has:
                    each[key] = item
    return dicts


def merge_reset(info: Columns, reset_info: Columns, done: NDArray[np.bool_]) -> Columns:
    """Returns the infos of a step, and for environments that it ended those of the reset that followed."""
    merged: Columns = {}
    for key in {**info, **reset_info}:
        if is_mask(key, info) or is_mask(key, reset_info):
            continue
        parts = [(part, among) for part, among in ((info, ~done), (reset_info, done)) if key in part]
        values = [part[key] for part, _ in parts]
        if len(parts) == 1:
            merged[key] = values[0]
        elif all(type(value) is dict for value in values):
            merged[key] = merge_reset(values[0], values[1], done)
        else:
            merged[key] = _chosen(_rows(values[0], len(done)), _rows(values[1], len(done)), done)
        merged[f"_{key}"] = np.logical_or.reduce([mask_of(key, part, len(done)) & among for part, among in parts])
    return merged


def _chosen(rows: NDArray[Any], others: NDArray[Any], chooses_other: NDArray[np.bool_]) -> NDArray[Any]:
    """Returns rows of two arrays ``[count, ...]``; objects, where the arrays are of different kinds."""
    if (rows.dtype, rows.shape) != (others.dtype, others.shape):
        rows, others = objects(list(rows)), objects(list(others))
    chosen = rows.copy()
    chosen[chooses_other] = others[chooses_other]
    return chosen
