"""Plans that divide a set of environment ids among their owners: the workers of a node or the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Tree, as_slice, tree_map
from rayvec.errors import ConfigError, counted, message

__all__ = ["Keys", "Part", "Plan", "Plans"]

_MOST_PLANS = 4096
_MOST_KEYS = 8


class Keys:
    """Turns arrays of ids into bytes, for dictionaries."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[NDArray[np.int64], bytes]] = {}

    def of(self, env_ids: NDArray[np.int64]) -> bytes:
        """Returns the ids as bytes. It takes no time for a read-only array that is passed again."""
        known = self._known.get(id(env_ids))
        if known is not None:
            return known[1]
        key = env_ids.tobytes()
        if not env_ids.flags.writeable:
            if len(self._known) >= _MOST_KEYS:
                self._known.clear()
            self._known[id(env_ids)] = env_ids, key  # while the array is kept, no other one has its id
        return key


@dataclass(slots=True)
class Part:
    """The part of a set of environments that one owner (a worker or a node) holds.

    Attributes:
        owner: Index of the owner.
        start: Index of the owner's first environment.
        rows: The owner's own indices of these environments, ``int64 [k]``.
        places: Positions of these environments in the set, ``int64 [k]``.
        select: The same as `places`, as a slice if they are consecutive.
        of_all: Ids of these environments in the whole pool, as a slice if they are consecutive.
        units: What names these environments in commands, ``int64 [u]``: `rows`, or the owner's own indices of native
            sub-batches.
        whole: Whether the part holds all environments of each native sub-batch.
        number: Used by the pool: number of the last command posted for this part.
        commands: Used by the link to the owner: cache of encoded commands for this part.
    """

    owner: int
    start: int
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    select: Any
    of_all: Any
    units: NDArray[np.int64]
    whole: bool = True
    number: int = -1
    commands: dict[Any, NDArray[np.int64]] = field(default_factory=dict)

    def without(self, other: Part) -> Part:
        """Returns the part without the environments of another part."""
        left = ~np.isin(self.rows, other.rows)
        places, rows = self.places[left], self.rows[left]
        return Part(self.owner, self.start, rows, places, as_slice(places), as_slice(self.start + rows), rows)

    def take(self, actions: Tree) -> Tree:
        """Returns this part's actions from a batch, or from a list of objects."""
        if isinstance(actions, np.ndarray):
            return actions[self.select]
        if isinstance(actions, list):
            return [actions[i] for i in self.places.tolist()]
        return tree_map(lambda leaf: np.asarray(leaf)[self.select], actions)


@dataclass(slots=True)
class Plan:
    """A set of ids, divided among their owners.

    Attributes:
        key: The ids as bytes.
        ids: The ids in the caller's order, ``int64 [k]``.
        select: The same as `ids`, as a slice if they are consecutive, so that indexing returns views.
        parts: One part for each owner that holds some of the ids, in ascending order.
        turn: Used by the pool: the turn in which this exact set was last requested.
    """

    key: bytes
    ids: NDArray[np.int64]
    select: Any
    parts: list[Part]
    turn: int = -1

    def check_whole(self) -> None:
        """Raises ``ConfigError`` if some environments of a native sub-batch are missing."""
        if not all([part.whole for part in self.parts]):
            raise ConfigError(
                "A native sub-batch steps as a whole.",
                expected="all environments of each sub-batch, in order",
                got=f"{len(self.ids)} environments that are a part of one, or in another order",
                remedy="Step every environment, or use ordinary environments.",
            )

    def in_order(self, of_parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns values, given part by part, in the order of the ids."""
        values: list[Any] = [None] * len(self.ids)
        for part, of_part in zip(self.parts, of_parts, strict=True):
            for place, value in zip(part.places.tolist(), of_part, strict=True):
                values[place] = value
        return values


class Plans:
    """A cache of plans.

    Args:
        starts: Index of the first environment of each owner, ascending, ``int64 [owners]``.
        num_envs: The number of environments N.
        unit_bounds: Bounds of native sub-batches, ``int64 [sub-batches + 1]``; None for ordinary environments.
    """

    def __init__(self, starts: NDArray[np.int64], num_envs: int, unit_bounds: NDArray[np.int64] | None = None) -> None:
        self._starts = starts
        self._num_envs = num_envs
        self._unit_bounds = unit_bounds
        self._plans: dict[bytes, Plan] = {}
        self._keys = Keys()

    def of(self, env_ids: NDArray[np.int64]) -> Plan:
        """Returns the plan of a set of ids. It takes no time for a read-only array that is passed again.

        Raises:
            ValueError: Ids repeat, or are not those of environments.
        """
        key = self._keys.of(env_ids)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:  # random subsets would fill the memory
                self._plans.clear()
            plan = self._plans[key] = self._make(key, np.array(env_ids, np.int64))
        return plan

    def _make(self, key: bytes, ids: NDArray[np.int64]) -> Plan:
        if len(np.unique(ids)) < len(ids) or np.any((ids < 0) | (ids >= self._num_envs)):
            raise ValueError(
                message(
                    "A call names each environment at most once.",
                    expected=f"different indices of {counted(self._num_envs, 'environment')}, from 0",
                    got=ids[:10].tolist(),
                    remedy="Leave out the index that comes twice, or that no environment has.",
                )
            )
        owner = np.searchsorted(self._starts, ids, side="right") - 1
        parts = []
        for k in np.unique(owner).tolist():
            places = np.flatnonzero(owner == k)
            start = int(self._starts[k])
            of_all, rows = as_slice(ids[places]), ids[places] - start
            units, whole = rows, True
            if self._unit_bounds is not None:
                bounds = self._unit_bounds[np.searchsorted(self._unit_bounds, start) :] - start
                units, whole = _whole_units(rows, bounds)
            parts.append(Part(k, start, rows, places, as_slice(places), of_all, units, whole))
        return Plan(key, ids, as_slice(ids), parts)


def _whole_units(rows: NDArray[np.int64], bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
    """Returns the native sub-batches of some environments, ``int64 [u]``, and whether all of each are among them.

    Args:
        rows: Indices of the environments.
        bounds: Bounds of the sub-batches.
    """
    unit_of = np.searchsorted(bounds, rows, side="right") - 1
    units = unit_of[np.sort(np.unique(unit_of, return_index=True)[1])]
    every = [np.arange(bounds[unit], bounds[unit + 1]) for unit in units]
    whole = bool(len(units) == 0 or np.array_equal(np.concatenate(every), rows))
    return units, whole
