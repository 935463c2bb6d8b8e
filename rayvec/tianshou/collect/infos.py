"""Infos of a chunk in the form in which Tianshou's Batch holds them, for all steps at once.

Tianshou turns the info dicts of every step into a Batch: one row for each environment, with 0 or None where it lacks
a key. As long as a key's values are of one type, that gives the same step by step as for all steps together.
Otherwise the result depends on the step, and :func:`info_columns` returns None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tianshou.data import Batch

from rayvec.data import Chunk, tree_map
from rayvec.data.columns import Columns, having, is_mask, mask_of, select
from rayvec.data.infos import ChunkInfo

__all__ = ["info_columns", "info_rows"]


class _IrregularError(Exception):
    """The values of a key are not all numbers of one type, arrays of one form, texts, or dicts."""


def info_columns(chunk: Chunk, env_ids: NDArray[np.int64], held: Any) -> dict[str, Any] | None:
    """Returns the infos of a chunk's valid steps, ``[T, N, ...]`` for each key, nested as the infos are.

    Args:
        chunk: The chunk.
        env_ids: What to write under ``env_id``, ``int64 [N]``.
        held: The infos that the buffer holds already, a Batch, or None.

    Returns:
        Columns, with 0 or None where a step has no such key; None if they depend on the step that they are of.
    """
    lead = chunk.valid.shape
    infos = chunk.infos if chunk.valid.all() else chunk.infos.where(lambda t, n: chunk.valid[t, n])
    ours = {key: column for key, column in infos.columns.items() if key not in ("env_id", "_env_id")}
    try:
        columns = _spread(ours, infos.places @ (lead[1], 1), lead[0] * lead[1])
        columns["env_id"] = np.tile(env_ids, lead[0])
        _check_kinds(columns, held)
    except _IrregularError:
        return None
    return cast(dict[str, Any], tree_map(lambda column: column.reshape(*lead, *column.shape[1:]), columns))


def info_rows(infos: Sequence[ChunkInfo], columns: NDArray[np.intp], env_ids: NDArray[np.int64]) -> NDArray[Any]:
    """Returns the infos of one step as Tianshou's vector environments do: dicts with ``env_id``, ``object [k]``.

    Args:
        infos: The infos of the step that are not empty.
        columns: Columns of the environments that took the step, ``[k]``.
        env_ids: Their indices, ``int64 [k]``.
    """
    by_column = {item.n: item.info for item in infos}
    pairs = zip(columns.tolist(), env_ids.tolist(), strict=True)
    rows = ({**by_column.get(column, {}), "env_id": env_id} for column, env_id in pairs)
    return np.fromiter(rows, object, len(columns))


def _spread(columns: Columns, at: NDArray[np.int64], size: int) -> dict[str, Any]:
    """Spreads columns of infos over `size` rows; `at` says which of them theirs are."""
    spread: dict[str, Any] = {}
    for key, column in columns.items():
        if is_mask(key, columns):
            continue
        rows = np.flatnonzero(mask_of(key, columns, len(at)))
        is_dict = type(column) is dict
        if not isinstance(key, str) or (is_dict and not having(column, len(at))[rows].all()):
            raise _IrregularError
        if is_dict:
            spread[key] = _spread(select(column, rows), at[rows], size)
            continue
        values = column[rows]
        is_text = values.dtype == object and set(map(type, values)) == {str}
        if values.dtype.kind not in "biufc" and not is_text:
            raise _IrregularError
        spread[key] = np.full((size, *values.shape[1:]), None if is_text else 0, values.dtype)
        spread[key][at[rows]] = values
    return spread


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
