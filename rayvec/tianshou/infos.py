"""Infos of a chunk in the form in which Tianshou's Batch holds them, for all steps at once.

Tianshou turns the info dicts of every step into a Batch: values of the environments side by side, and where an
environment has not got a key, 0 or None. As long as a key's values are of one type, that gives the same for each
step as for all steps together; where they are not, what comes out depends on the step, and :func:`info_columns`
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tianshou.data import Batch

from rayvec.types import Chunk, ChunkInfo

__all__ = ["info_columns", "info_rows"]

_NUMBERS = "biufc"


class _IrregularError(Exception):
    """Some key has values of several types, or of one that is neither number, array, text nor dict."""


def info_columns(chunk: Chunk, env_ids: NDArray[np.int64], held: Any) -> dict[str, Any] | None:
    """Returns the infos of a chunk's valid steps, ``[T, N, ...]`` for each key, nested as the infos are.

    Args:
        chunk: Whose infos.
        env_ids: What to write under ``env_id``, ``int64 [N]``.
        held: The infos that the buffer holds already, a Batch, or None.

    Returns:
        Columns, with 0 or None where a step has no such key; None if they depend on the step that they are of.
    """
    lead = chunk.valid.shape
    places = np.array([t * lead[1] + n for t, n, _ in chunk.infos], np.int64)
    infos = [info for _, _, info in chunk.infos]
    if not chunk.valid.all():
        rows = np.flatnonzero(chunk.valid.reshape(-1)[places])
        places, infos = places[rows], [infos[row] for row in rows.tolist()]
    try:
        columns = _columns(infos, places, lead[0] * lead[1])
        columns["env_id"] = np.tile(env_ids, lead[0])
        _check_kinds(columns, held)
    except _IrregularError:
        return None
    return _reshape(columns, lead)


def info_rows(infos: Sequence[ChunkInfo], columns: NDArray[np.intp], env_ids: NDArray[np.int64]) -> NDArray[Any]:
    """Returns the infos of one step as Tianshou's vector environments do: dicts with ``env_id``, ``object [k]``.

    Args:
        infos: Those of the step that are not empty.
        columns: Of the environments that took the step, ``[k]``.
        env_ids: Their indices, ``int64 [k]``.
    """
    by_column = {item.n: item.info for item in infos}
    rows = np.empty(len(columns), object)
    for row, (column, env_id) in enumerate(zip(columns.tolist(), env_ids.tolist(), strict=True)):
        rows[row] = {**by_column.get(column, {}), "env_id": env_id}
    return rows


def _columns(infos: Sequence[dict[str, Any]], places: NDArray[np.int64], size: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for key, (values, at) in _by_key(infos, places).items():
        if not isinstance(key, str):
            raise _IrregularError
        types = set(map(type, values))
        if types == {dict}:
            if not all(values):
                raise _IrregularError
            columns[key] = _columns(values, at, size)
            continue
        array = _array(values, types)
        columns[key] = np.full((size, *array.shape[1:]), None if array.dtype == object else 0, array.dtype)
        columns[key][at] = array
    return columns


def _by_key(
    infos: Sequence[dict[str, Any]], places: NDArray[np.int64]
) -> dict[str, tuple[list[Any], NDArray[np.int64]]]:
    """Returns, for each key, its values and their places."""
    all_keys = list(map(tuple, infos))
    rows_of: dict[tuple[str, ...], list[int]] = {keys: [] for keys in all_keys}
    if len(rows_of) > 1:
        for i, keys in enumerate(all_keys):
            rows_of[keys].append(i)
    gathered: dict[str, list[tuple[list[Any], NDArray[np.int64]]]] = {}
    for keys, rows in rows_of.items():
        same, at = ([infos[i] for i in rows], places[rows]) if rows else (infos, places)
        for key in keys:
            if key != "env_id":
                gathered.setdefault(key, []).append(([info[key] for info in same], at))
    return {
        key: parts[0]
        if len(parts) == 1
        else ([value for values, _ in parts for value in values], np.concatenate([at for _, at in parts]))
        for key, parts in gathered.items()
    }


def _array(values: list[Any], types: set[type]) -> NDArray[Any]:
    if types == {np.ndarray}:
        if len({(value.dtype, value.shape) for value in values}) > 1 or values[0].dtype.kind not in _NUMBERS:
            raise _IrregularError
        return np.stack(values)
    if types == {str}:
        return np.array(values).astype(object)
    if not all(kind in (bool, int, float) or issubclass(kind, np.generic) for kind in types):
        raise _IrregularError
    array = np.array(values)
    if {np.dtype(kind) for kind in types} != {array.dtype} or array.dtype.kind not in _NUMBERS:
        raise _IrregularError
    return array


def _check_kinds(columns: dict[str, Any], held: Any) -> None:
    """What is missing becomes 0 among numbers, None among objects: both must agree on which they are."""
    if not isinstance(held, Batch):
        return
    for key, column in columns.items():
        if key not in held:
            continue
        if isinstance(column, dict) != isinstance(held[key], Batch):
            raise _IrregularError
        if isinstance(column, dict):
            _check_kinds(column, held[key])
        elif (held[key].dtype == object) != (column.dtype == object):
            raise _IrregularError


def _reshape(columns: dict[str, Any], lead: tuple[int, ...]) -> dict[str, Any]:
    return {
        key: _reshape(column, lead) if isinstance(column, dict) else column.reshape(*lead, *column.shape[1:])
        for key, column in columns.items()
    }
