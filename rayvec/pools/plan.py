"""What a set of ids means for those who hold the environments: workers of a node, or nodes of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.data import StepBatch, Tree, as_slice, tree_map

__all__ = ["Part", "Plan", "Plans"]

_MOST_PLANS = 4096


@dataclass(slots=True)
class Part:
    """The share of one owner (a worker, or a node) in a set of environments.

    Attributes:
        owner: Its number.
        start: Index of its first environment.
        rows: Its own ids of those that are meant, ``int64 [k]``.
        places: Where they stand in the set, ``int64 [k]``.
        select: The same as a slice where they are consecutive.
        of_all: Their ids among those of all owners, as a slice where they are consecutive.
        number: For the owner's client: of the last command posted for this part.
        commands: For the owner's client: commands that it has posted before, to be posted again.
    """

    owner: int
    start: int
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    select: Any
    of_all: Any
    number: int = -1
    commands: dict[Any, NDArray[np.int64]] = field(default_factory=dict)

    def take(self, actions: Tree) -> Tree:
        """Returns this part's share of a batch of actions, or of a list of objects."""
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
        ids: In the caller's order, ``int64 [k]``.
        select: The same as a slice where they are consecutive, so that indexing gives views.
        parts: One for each owner concerned, in ascending order.
        turn: For the owners' client: when exactly this set was asked for last.
        rows: For who joins answers: the arrays of these environments, where they are consecutive.
    """

    key: bytes
    ids: NDArray[np.int64]
    select: Any
    parts: list[Part]
    turn: int = -1
    rows: StepBatch | None = None


class Plans:
    """Plans, each made once.

    Args:
        starts: Index of the first environment of each owner, ascending.
    """

    def __init__(self, starts: NDArray[np.int64]) -> None:
        self._starts = starts
        self._plans: dict[bytes, Plan] = {}

    def of(self, env_ids: NDArray[np.int64]) -> Plan:
        """Returns the plan of a set of ids."""
        key = env_ids.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:  # random subsets would otherwise be kept for ever
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
