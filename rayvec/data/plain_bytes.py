"""Values as bytes that execute nothing when they are read: for checkpoints."""

from __future__ import annotations

import json
import operator
import struct
from copy import deepcopy
from typing import Any

from rayvec.env_server import decoded, encoded

__all__ = ["from_bytes", "to_bytes"]

_LENGTH = struct.Struct("!I")


def to_bytes(value: Any) -> bytes:
    """Returns dicts, lists, tuples, strings, numbers and arrays of numbers as bytes.

    Raises:
        TypeError: Something else is in them, or a subclass of these.

    >>> from_bytes(to_bytes({"t": (1, 2.5), 3: None}))
    {'t': (1, 2.5), 3: None}
    """
    arrays: list[bytes] = []
    text = json.dumps(encoded(value, arrays, operator.is_)).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *arrays))


def from_bytes(data: bytes) -> Any:
    """Returns what :func:`to_bytes` was given."""
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    return deepcopy(decoded(json.loads(data[_LENGTH.size : start]), bytearray(data[start:]), [0]))
