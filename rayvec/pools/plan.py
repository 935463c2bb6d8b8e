"""Plans that divide a set of environment ids among their owners: the workers of a node or the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import Tree, as_slice, tree_map

__all__ = ["Part", "Plan", "Plans"]

_MOST_PLANS = 4096


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
        number: Used by the pool: number of the last command posted for this part.
        commands: Used by the link to the owner: cache of encoded commands for this part.
    """

    owner: int
    start: int
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    select: Any
    of_all: Any
    number: int = -1
    commands: dict[Any, NDArray[np.int64]] = field(default_factory=dict)

    def without(self, other: Part) -> Part:
        """Returns the part without the environments of another part."""
        left = ~np.isin(self.rows, other.rows)
        places, rows = self.places[left], self.rows[left]
        return Part(self.owner, self.start, rows, places, as_slice(places), as_slice(self.start + rows))

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
    """

    def __init__(self, starts: NDArray[np.int64]) -> None:
        self._starts = starts
        self._plans: dict[bytes, Plan] = {}

    def of(self, env_ids: NDArray[np.int64]) -> Plan:
        """Returns the plan of a set of ids."""
        key = env_ids.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:  # random subsets would fill the memory
                self._plans.clear()
            plan = self._plans[key] = self._make(key, np.array(env_ids, np.int64))
        return plan

    def _make(self, key: bytes, ids: NDArray[np.int64]) -> Plan:
        owner = np.searchsorted(self._starts, ids, side="right") - 1
        parts = []
        for k in np.unique(owner).tolist():
            places = np.flatnonzero(owner == k)
            start = int(self._starts[k])
            parts.append(Part(k, start, ids[places] - start, places, as_slice(places), as_slice(ids[places])))
        return Plan(key, ids, as_slice(ids), parts)
