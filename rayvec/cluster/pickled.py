"""Values between the driver and the actor of a node that rayvec pickles itself.

Ray pickles with a cloudpickle of its own. A class of the driver's script that came to a node by the other cloudpickle
would come back as another class: enums would not be equal, and ``isinstance`` would be False.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from rayvec.data import Chunk, ChunkInfos, ChunkSummary, tree_leaves
from rayvec.node.messages import dumps

__all__ = ["Pickled", "with_objects_pickled"]

_T = TypeVar("_T", Chunk, ChunkSummary)


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value that the receiver unpickles, where it can handle what that raises.

    Attributes:
        data: The pickled value.
    """

    data: bytes

    @classmethod
    def of(cls, value: Any) -> Pickled:
        """Pickles a value."""
        return cls(dumps(value))

    def load(self) -> Any:
        """Returns the value."""
        return pickle.loads(self.data)


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A value that Ray pickles as bytes and unpickles as the value."""

    value: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (dumps(self.value),)


def with_objects_pickled(chunk: _T) -> _T:
    """Returns a chunk, or a summary of one, for Ray to pickle, whose parts with objects Ray does not pickle itself."""
    values = {each.name: getattr(chunk, each.name) for each in fields(chunk)}
    sealed: dict[str, Any] = {name: _Sealed(value) for name, value in values.items() if _has_objects(value)}
    return replace(chunk, **sealed) if sealed else chunk


def _has_objects(value: Any) -> bool:
    if isinstance(value, ChunkInfos):
        columns = [item for block in value.blocks for item in block.columns.items()]
        return any(type(key) is not str or column.values.dtype.hasobject for key, column in columns)
    return any(getattr(leaf, "dtype", None) is not None and leaf.dtype.hasobject for leaf in tree_leaves(value))
