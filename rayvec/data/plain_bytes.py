"""Values as bytes that execute nothing when they are read: for checkpoints."""

from __future__ import annotations

import operator
from copy import deepcopy
from typing import Any

from rayvec.env_server import LENGTHS, pack, unpack


def to_bytes(value: Any) -> bytes:
    """Returns dicts, lists, tuples, strings, numbers and arrays of numbers as bytes.

    Raises:
        TypeError: Something else is in them, or a subclass of these.

    >>> from_bytes(to_bytes({"t": (1, 2.5), 3: None}))
    {'t': (1, 2.5), 3: None}
    """
    return pack(value, operator.is_)


def from_bytes(data: bytes) -> Any:
    """Returns what :func:`to_bytes` was given."""
    text_bytes, _ = LENGTHS.unpack_from(data)
    return deepcopy(unpack(bytearray(data[LENGTHS.size :]), text_bytes))
