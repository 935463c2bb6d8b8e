"""The infos of native sub-batches: columns with a row for each environment, as a vector environment returns them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayvec.data.columns import PLAIN, is_mask, mask_of, plain
from rayvec.data.infos import InfoBlock, InfoColumn
from rayvec.data.trees import objects

__all__ = ["SubBatchInfo", "info_blocks", "is_mask", "mask_of", "merge_columns", "merge_reset"]

Columns = dict[str, Any]


class SubBatchInfo(NamedTuple):
    """The infos that a sub-batch returned from one step or reset.

    Attributes:
        env_id: Global index of the sub-batch's first environment.
        num_envs: How many environments it has.
        columns: The info dict as the vector environment returned it: arrays ``[num_envs, ...]`` by key, with masks
            ``bool [num_envs]`` by ``_key``, and dicts of such.
    """

    env_id: int
    num_envs: int
    columns: Columns


def merge_columns(infos: Sequence[SubBatchInfo], num_envs: int) -> Columns:
    """Returns the columns of all environments; the `env_id` of each info counts from the first of them.

    The infos of a single sub-batch are returned as they are.
    """
    if len(infos) == 1 and infos[0].num_envs == num_envs:
        return infos[0].columns
    slices = [slice(info.env_id, info.env_id + info.num_envs) for info in infos]
    return _merged([info.columns for info in infos], slices, num_envs)


def _merged(parts: Sequence[Columns], slices: Sequence[slice], num_envs: int) -> Columns:
    """Merges the columns of slices of the environments."""
    merged: Columns = {}
    for key in dict.fromkeys(key for part in parts for key in part if not is_mask(key, part)):
        having = [(part, rows) for part, rows in zip(parts, slices, strict=True) if key in part]
        values = [part[key] for part, _ in having]
        rows_of = [rows for _, rows in having]
        if all(type(value) is dict for value in values):
            merged[key] = _merged(values, rows_of, num_envs)
        else:
            merged[key] = _concatenated(values, rows_of, num_envs)
        mask = np.zeros(num_envs, bool)
        for part, rows in having:
            mask[rows] = mask_of(key, part, rows.stop - rows.start)
        if not mask.all() or any(f"_{key}" in part for part, _ in having):
            merged[f"_{key}"] = mask
    return merged


def _concatenated(values: Sequence[Any], slices: Sequence[slice], num_envs: int) -> NDArray[Any]:
    """Returns one array ``[num_envs, ...]``: zeros, or None for objects, where no slice has a value.

    Numbers of several types get NumPy's common type.
    """
    columns = [_rows(value, rows.stop - rows.start) for value, rows in zip(values, slices, strict=True)]
    dtypes, shapes = {column.dtype for column in columns}, {column.shape[1:] for column in columns}
    is_one_type = len(dtypes) == 1 or all(dtype.kind in "iuf" for dtype in dtypes)
    dtype, shape = np.dtype(object), ()
    if len(shapes) == 1 and is_one_type:
        dtype, shape = np.result_type(*dtypes), shapes.pop()
    joined: NDArray[Any] = np.full((num_envs, *shape), None if dtype.hasobject else np.zeros((), dtype), dtype)
    for column, rows in zip(columns, slices, strict=True):
        joined[rows] = column if column.shape[1:] == shape else objects(list(column))
    return joined


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
