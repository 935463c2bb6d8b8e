"""Infos as columns, the form of Gymnasium's vector environments: an array with a row for each environment, and a mask.

A key ``"x"`` that some environments have stands for a column ``"x"``, ``[N, ...]``, and a mask ``"_x"``, ``bool [N]``.
Dicts within infos are columns within columns. Infos keep this form from the environment to the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data.trees import copied

__all__ = [
    "PLAIN",
    "Columns",
    "Mixed",
    "columns_of",
    "info_of",
    "infos_of",
    "is_mask",
    "mask_of",
    "merge",
    "plain",
    "select",
    "settle",
]

Columns = dict[str, Any]
_WHOLE = "rayvec_info"
PLAIN: dict[type[Any], type[Any]] = {np.bool_: bool, np.int64: int, np.float64: float}
"""The types that single infos have in place of these: columns do not tell Python's numbers from NumPy's."""


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
            columns[key] = _column(key, items, num_envs)
        mask = columns[f"_{key}"] = np.zeros(num_envs, bool)
        mask[[row for row, _ in items]] = True
    return columns


def _column(key: Any, items: Sequence[tuple[int, Any]], num_envs: int) -> NDArray[Any]:
    first = items[0][1]
    if key == "final_obs":
        column = _blank(None, num_envs)
    elif all(_kind(value) == _kind(first) for _, value in items):
        column = _blank(first, num_envs)
    else:
        column = _blank(None, num_envs).view(Mixed)
    for row, value in items:
        column[row] = value
    return column


def _kind(value: Any) -> Any:
    """Returns what the values of one column have in common."""
    return (value.dtype, value.shape) if isinstance(value, np.ndarray) else type(value)


def _blank(value: Any, num_envs: int) -> NDArray[Any]:
    """Returns the column that Gymnasium makes when `value` is the first one under a key."""
    if isinstance(value, np.ndarray):
        return np.zeros((num_envs, *value.shape), value.dtype)
    if type(value) in (int, float, bool) or isinstance(value, np.number):
        return np.zeros(num_envs, type(value))
    return np.full(num_envs, None)


def merge(parts: Sequence[tuple[slice, Columns]], num_envs: int) -> Columns:
    """Merges the columns of slices of the environments, given with their rows in ascending order.

    Columns of all environments are returned as they are.
    """
    if len(parts) == 1 and parts[0][0] == slice(0, num_envs):
        return parts[0][1]
    merged: Columns = {}
    for key in dict.fromkeys(key for _, part in parts for key in part if not is_mask(key, part)):
        having = [(rows, part) for rows, part in parts if key in part]
        if all(type(part[key]) is dict for _, part in having):
            merged[key] = merge([(rows, part[key]) for rows, part in having], num_envs)
        else:
            merged[key] = _joined([(rows, _rows(part[key], rows.stop - rows.start)) for rows, part in having], num_envs)
        mask = np.zeros(num_envs, bool)
        for rows, part in having:
            mask[rows] = mask_of(key, part, rows.stop - rows.start)
        if not mask.all() or any(f"_{key}" in part for _, part in having):
            merged[f"_{key}"] = mask
    return merged


def _joined(columns: Sequence[tuple[slice, NDArray[Any]]], num_envs: int) -> NDArray[Any]:
    """Returns one column of all environments: zeros, or None for objects, where no slice has a value."""
    first = columns[0][1]
    kind = first.dtype, first.shape[1:], type(first)
    if all((column.dtype, column.shape[1:], type(column)) == kind for _, column in columns) and kind[2] is not Mixed:
        joined = np.zeros((num_envs, *first.shape[1:]), first.dtype)
        if first.dtype == object and first.ndim == 1:
            joined[:] = None
    else:
        joined = _blank(None, num_envs).view(Mixed)
    for rows, column in columns:
        joined[rows] = column if column.ndim == joined.ndim else np.fromiter(column, object, len(column))
    return joined


def _rows(value: Any, count: int) -> NDArray[Any]:
    """Returns an array with a row for each environment; a value that has no rows stands in each of them."""
    if isinstance(value, np.ndarray) and value.shape[:1] == (count,):
        return value
    has_rows = isinstance(value, list | tuple) and len(value) == count
    return np.fromiter(value if has_rows else [value] * count, object, count)


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


def select(columns: Columns, rows: NDArray[np.int64]) -> Columns:
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
    return {
        key: info_of(value, row) if type(value) is dict else plain(value[row : row + 1])[0]
        for key, value in columns.items()
        if not is_mask(key, columns) and (f"_{key}" not in columns or columns[f"_{key}"][row])
    }


def plain(column: NDArray[Any]) -> Any:
    """Returns the values of a column, with Python's own numbers in place of those in `PLAIN`."""
    return column.tolist() if column.ndim == 1 and column.dtype.type in PLAIN else column


class Whole:
    """The info of one environment, which columns hold as one value: its types and its order stay.

    Args:
        info: The info.
    """

    __slots__ = ("info",)

    def __init__(self, info: dict[Any, Any]) -> None:
        self.info = info

    def __deepcopy__(self, memo: Any) -> Whole:
        return Whole({key: copied(value) for key, value in self.info.items()})


def whole(info: Any) -> Any:
    """Returns the info of a step or reset, for libraries that take a dict for each environment, as a :class:`Whole`."""
    return {_WHOLE: Whole(info)} if info and isinstance(info, dict) else info


def unwrapped(info: dict[Any, Any]) -> dict[Any, Any]:
    """Returns an info that :func:`whole` may have wrapped, with what was added to it."""
    found = info.pop(_WHOLE, None)
    return info if found is None else {**found.info, **info}


def infos_of(columns: Columns, rows: Sequence[int]) -> list[dict[Any, Any]]:
    """Returns the infos of some environments: dicts, which are empty for those that have none."""
    return [unwrapped(info_of(columns, row)) for row in rows] if columns else [{} for _ in rows]
