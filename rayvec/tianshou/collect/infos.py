"""Infos of a chunk in the form in which Tianshou's Batch holds them, for all steps at once.

Tianshou turns the info dicts of every step into a Batch: one row for each environment, with 0 or None where it lacks
a key. As long as a key's values are of one type, that gives the same step by step as for all steps together.
Otherwise the result depends on the step, and :func:`info_columns` returns None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tianshou.data import Batch

from rayvec.data import ChunkInfo, objects

__all__ = ["info_columns", "info_rows"]

_REGULAR = (int, float, complex, np.number, np.bool_, np.ndarray, str)


def info_columns(infos: Iterable[tuple[int, dict[Any, Any]]], size: int, held: Any) -> dict[str, Any] | None:
    """Returns infos as columns ``[size, ...]``, nested as the infos are.

    Args:
        infos: Infos with the row that each belongs to.
        size: The number of rows.
        held: The infos that the buffer holds already, a Batch, or None.

    Returns:
        Columns, with 0 or None where a row has no such key; None if they depend on the step that they are of.
    """
    gathered: dict[Any, tuple[list[int], list[Any]]] = {}
    for row, info in infos:
        for key, value in info.items():
            rows, values = gathered.setdefault(key, ([], []))
            rows.append(row)
            values.append(value)
    columns: dict[str, Any] = {}
    for key, (rows, values) in gathered.items():
        before = held.get(key) if isinstance(held, Batch) else None
        if set(map(type, values)) == {dict} and all(values) and (before is None or isinstance(before, Batch)):
            columns[key] = info_columns(zip(rows, values, strict=True), size, before)
        else:
            columns[key] = _column(rows, values, size, before)
        if columns[key] is None or not isinstance(key, str):
            return None
    return columns


def _column(rows: list[int], values: list[Any], size: int, held: Any) -> NDArray[Any] | None:
    """Returns one column; None unless all values, and what the buffer holds, are of one form."""
    kind, *others = set(map(type, values))
    forms = {(each.dtype, each.shape) for each in values} if kind is np.ndarray else ()
    if others or len(forms) > 1 or not issubclass(kind, _REGULAR):
        return None
    array = objects(values) if kind is str else np.array(values)
    fits = held is None or (isinstance(held, np.ndarray) and (held.dtype.kind == "O") == (kind is str))
    if not fits or (kind is not str and array.dtype.kind not in "biufc"):
        return None
    column = np.full((size, *array.shape[1:]), None if kind is str else 0, array.dtype)
    column[rows] = array
    return column


def info_rows(infos: Sequence[ChunkInfo], columns: NDArray[np.intp], env_ids: NDArray[np.int64]) -> NDArray[Any]:
    """Returns the infos of one step as Tianshou's vector environments do: dicts with ``env_id``, ``object [k]``.

    Args:
        infos: The infos of the step that are not empty.
        columns: Columns of the environments that took the step, ``[k]``.
        env_ids: Their indices, ``int64 [k]``.
    """
    by_column = {item.n: item.info for item in infos}
    pairs = zip(columns.tolist(), env_ids.tolist(), strict=True)
    return objects([{**by_column.get(column, {}), "env_id": env_id} for column, env_id in pairs])
