"""Infos as columns, the form of Gymnasium's vector environments: an array with a row for each environment, and a mask.

A key ``"x"`` that some environments have stands for a column ``"x"``, ``[N, ...]``, and a mask ``"_x"``, ``bool [N]``.
Dicts within infos are columns within columns. Infos keep this form from the environment to the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.trees import copied, objects

Columns = dict[str, Any]
_WHOLE = "rayvec_info"
_PLAIN = (np.bool_, np.int64, np.float64)
"""Single infos have Python's own numbers in place of these: columns do not tell one from the other."""


class Mixed(np.ndarray[Any, Any]):
    """A column ``object [N]`` of values that have several types. :func:`settle` gives them one."""


def is_mask(key: Any, columns: Columns) -> bool:
    """Returns whether a key names the mask of another key, which need not be a string.

    >>> is_mask("_x", {"x": 1, "_x": 2}), is_mask("_x", {"_x": 2}), is_mask("_3", {3: 1, "_3": 2})
    (True, False, True)
    """
    if type(key) is not str or key[:1] != "_":
        return False
    return key[1:] in columns or any(type(other) is not str and str(other) == key[1:] for other in columns)


def mask_of(key: Any, columns: Columns, count: int) -> NDArray[np.bool_]:
    """Returns which environments have a value under a key, ``bool [count]``: all of them, where no mask says so."""
    mask = columns.get(f"_{key}")
    return np.ones(count, bool) if mask is None else np.asarray(mask, bool)


def having(columns: Columns, count: int) -> NDArray[np.bool_]:
    """Returns which environments have an info, ``bool [count]``."""
    masks = [mask_of(key, columns, count) for key in columns if not is_mask(key, columns)]
    return np.asarray(np.logical_or.reduce([np.zeros(count, bool), *masks]))


def columns_of(infos: Iterable[tuple[int, dict[Any, Any]]], num_envs: int) -> Columns:
    """Makes columns of the infos of single environments, given with their rows.

    >>> columns_of([(1, {"x": 2.5})], num_envs=2)
    {'x': array([0. , 2.5]), '_x': array([False,  True])}
    """
    found: dict[Any, list[tuple[int, Any]]] = {}
    for row, info in infos:
        for key, value in info.items():
            found.setdefault(key, []).append((row, value))
    columns: Columns = {}
    for key, items in found.items():
        if key != "final_obs" and all(isinstance(value, dict) for _, value in items):
            columns[key] = columns_of(items, num_envs)
        else:
            kinds = {object} if key == "final_obs" else {_kind(value) for _, value in items}
            column = _blank(None if kinds == {object} or len(kinds) > 1 else items[0][1], num_envs)
            columns[key] = column if len(kinds) == 1 else column.view(Mixed)
            for row, value in items:
                column[row] = value
        mask = columns[f"_{key}"] = np.zeros(num_envs, bool)
        mask[[row for row, _ in items]] = True
    return columns


def _kind(value: Any) -> Any:
    """Returns what the values of one column have in common."""
    if isinstance(value, np.timedelta64) or (type(value) is int and value.bit_length() > 63):
        return object
    return (value.dtype, value.shape) if isinstance(value, np.ndarray) else type(value)


def _blank(value: Any, num_envs: int) -> NDArray[Any]:
    """Returns the column that Gymnasium makes when `value` is the first one under a key."""
    if isinstance(value, np.ndarray):
        return np.zeros((num_envs, *value.shape), value.dtype)
    kind = _kind(value)
    if kind in (int, float, bool) or (isinstance(value, np.number) and kind is not object):
        return np.zeros(num_envs, kind)
    return np.empty(num_envs, object)  # of None


def as_columns(infos: Columns, count: int) -> Columns:
    """Copies the infos of a vector environment. A value that has no rows stands in each of them."""

    def rows(value: Any) -> NDArray[Any]:
        if isinstance(value, np.ndarray) and value.shape[:1] == (count,):
            return value
        return objects(value if isinstance(value, list | tuple) and len(value) == count else [value] * count)

    return {
        key: as_columns(value, count) if type(value) is dict else copied(rows(value)) for key, value in infos.items()
    }


def merge(parts: Sequence[tuple[Any, Columns]], num_envs: int) -> Columns:
    """Merges the columns of some environments each, given with their rows, a slice or ``int64 [k]``, ascending.

    Columns of all environments are returned as they are.
    """
    counts = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for rows, _ in parts]
    if counts == [num_envs]:
        return parts[0][1]
    merged: Columns = {}
    for key in dict.fromkeys(key for _, part in parts for key in part if not is_mask(key, part)):
        found = [(rows, part, count) for (rows, part), count in zip(parts, counts, strict=True) if key in part]
        if all(type(part[key]) is dict for _, part, _ in found):
            merged[key] = merge([(rows, part[key]) for rows, part, _ in found], num_envs)
        else:
            merged[key] = _joined([(rows, _rows(part[key], count)) for rows, part, count in found], num_envs)
        mask = np.zeros(num_envs, bool)
        for rows, part, count in found:
            mask[rows] = mask_of(key, part, count)
        if not mask.all() or any(f"_{key}" in part for _, part, _ in found):
            merged[f"_{key}"] = mask
    return merged


def _rows(column: Any, count: int) -> NDArray[Any]:
    return objects([info_of(column, row) for row in range(count)]) if type(column) is dict else column


def _joined(columns: Sequence[tuple[Any, NDArray[Any]]], num_envs: int) -> NDArray[Any]:
    """Returns one column of all environments: zeros, or None for objects, where no part has a value."""
    first = columns[0][1]
    kinds = {(column.dtype, column.shape[1:], type(column)) for _, column in columns}
    if len(kinds) == 1 and type(first) is not Mixed:
        joined = np.zeros((num_envs, *first.shape[1:]), first.dtype)
        if first.dtype == object and first.ndim == 1:
            joined[:] = None
    else:
        joined = _blank(None, num_envs).view(Mixed)
    for rows, column in columns:
        joined[rows] = column if column.ndim == joined.ndim else np.fromiter(column, object, len(column))
    return joined


def settle(columns: Columns, *, common: bool = False) -> Columns:
    """Gives values of several types under one key one type, in place: that of the first, as Gymnasium does.

    Args:
        columns: Of all environments.
        common: Whether numbers get NumPy's common type in place of the first one's.
    """
    for key, value in columns.items():
        if type(value) is dict:
            settle(value, common=common)
        elif isinstance(value, Mixed):
            at = np.flatnonzero(mask_of(key, columns, len(value)))
            values = value[at].tolist()
            column = _blank(values[0], len(value))
            if common and all(np.ndim(each) == 0 and np.asarray(each).dtype.kind in "iuf" for each in values):
                column = column.astype(np.result_type(*(np.asarray(each) for each in values)))
            for row, each in zip(at.tolist(), values, strict=True):
                column[row] = each
            columns[key] = column
    return columns


def select(columns: Columns, rows: NDArray[Any]) -> Columns:
    """Returns the columns of some environments, in the order of `rows`; keys that none of them has are left out."""
    selected: Columns = {}
    for key, value in columns.items():
        mask = columns.get(f"_{key}")
        if is_mask(key, columns) or (mask is not None and not mask[rows].any()):
            continue
        selected[key] = select(value, rows) if type(value) is dict else value[rows]
        if mask is not None:
            selected[f"_{key}"] = mask[rows]
    return selected


def info_of(columns: Columns, row: int) -> dict[Any, Any]:
    """Returns the info of one environment, for libraries that take a dict for each. Numbers are Python's own.

    >>> info_of({"x": np.array([3, 0]), "_x": [True, False], "d": {"y": np.array([1, 2])}}, 1)
    {'d': {'y': 2}}
    """
    info = {}
    for key, value in columns.items():
        if not is_mask(key, columns) and (f"_{key}" not in columns or columns[f"_{key}"][row]):
            each: Any = info_of(value, row) if type(value) is dict else value[row]
            info[key] = each.item() if type(each) in _PLAIN and not value.dtype.hasobject else each
    return info


def whole(info: Any) -> Any:
    """Returns the info of a step or reset as one value, whose types and order stay, for libraries that take dicts."""
    return {_WHOLE: (info,)} if info and isinstance(info, dict) else info


def unwrapped(info: dict[Any, Any]) -> dict[Any, Any]:
    """Returns an info that :func:`whole` may have wrapped, with what was added to it."""
    found = info.pop(_WHOLE, None)
    return info if found is None else {**found[0], **info}


def infos_of(columns: Columns, rows: Sequence[int]) -> list[dict[Any, Any]]:
    """Returns the infos of some environments: dicts, which are empty for those that have none."""
    return [unwrapped(info_of(columns, row)) for row in rows] if columns else [{} for _ in rows]
