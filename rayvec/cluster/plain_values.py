"""Serializes plain values without pickle. Info dicts of remote nodes are sent in this form.

Bytes received over a socket are never unpickled. MessagePack supports None, booleans, numbers, strings, bytes, lists
and dicts; this module adds tuples, NumPy scalars and NumPy arrays. Every value is decoded with its original type.
Encoding raises an error for any other type.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgpack
import numpy as np

__all__ = ["NOT_PLAIN", "decode", "encode"]

_TUPLE, _ARRAY, _SCALAR = 1, 2, 3
_KINDS = "biufcSUmM"
_MOST_TUPLES = 32
"""The most tuples within each other. Each takes tens of kilobytes of the C stack to read."""
NOT_PLAIN = (TypeError, ValueError, OverflowError, RecursionError)
"""Exceptions that :func:`encode` raises."""


def encode(value: Any) -> bytes:
    """Returns `value` as bytes.

    Raises:
        TypeError: `value` contains an object of an unsupported type.
        ValueError: `value` is nested too deeply, or contains text that isn't valid Unicode.
        OverflowError: `value` contains an int of more than 64 bits.

    >>> decode(encode({"a": (1, 2.5), "b": None}))
    {'a': (1, 2.5), 'b': None}
    """
    _refuse_impostors(value)
    packed: bytes = msgpack.packb(value, default=_extend, strict_types=True, use_bin_type=True)
    return packed


def _refuse_impostors(value: Any, num_tuples: int = 0) -> None:
    """Raises ``TypeError`` for types that MessagePack would encode as bytes: ``bytearray`` and ``memoryview``."""
    kind = type(value)
    if kind is bytearray or kind is memoryview:
        raise TypeError(f"{kind.__name__} has no plain form")
    if kind is dict:
        for key, item in value.items():
            _refuse_impostors(key, num_tuples)
            _refuse_impostors(item, num_tuples)
    elif kind is list or kind is tuple:
        num_tuples += kind is tuple
        if num_tuples > _MOST_TUPLES:
            raise ValueError(f"more than {_MOST_TUPLES} tuples within each other")
        for item in value:
            _refuse_impostors(item, num_tuples)


def decode(data: bytes | memoryview) -> Any:
    """Returns the value that :func:`encode` serialized.

    Raises:
        ValueError: It is no such value.
    """
    return _decode(data, 0)


def _decode(data: bytes | memoryview, num_tuples: int) -> Any:
    if num_tuples > _MOST_TUPLES:
        raise ValueError(f"more than {_MOST_TUPLES} tuples within each other")
    return msgpack.unpackb(data, ext_hook=partial(_restore, num_tuples), strict_map_key=False, raw=False)


def _extend(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, encode(list(value)))
    if type(value) is np.ndarray and value.dtype.kind in _KINDS and value.dtype.itemsize > 0:
        head = encode([value.dtype.str, list(value.shape)])
        return msgpack.ExtType(_ARRAY, len(head).to_bytes(4, "little") + head + value.tobytes())
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS and value.dtype.itemsize > 0:
        return msgpack.ExtType(_SCALAR, encode([value.dtype.str, value.tobytes()]))
    raise TypeError(f"{type(value).__name__} has no plain form")


def _restore(num_tuples: int, code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(_decode(data, num_tuples + 1))
    if code == _ARRAY:
        size = int.from_bytes(data[:4], "little")
        dtype, shape = msgpack.unpackb(data[4 : 4 + size], raw=False)
        if len(data) == 4 + size:
            return np.empty(0, np.dtype(dtype)).reshape(shape)
        return np.frombuffer(data, np.dtype(dtype), offset=4 + size).reshape(shape).copy()
    if code == _SCALAR:
        dtype, raw = msgpack.unpackb(data, raw=False)
        return np.frombuffer(raw, np.dtype(dtype))[0]
    raise TypeError(f"unknown extension {code}")
