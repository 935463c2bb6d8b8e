"""Serializes plain values without pickle. Info dicts of remote nodes are sent in this form.

Bytes received over a socket are never unpickled. MessagePack supports None, booleans, numbers, strings, bytes, lists
and dicts; this module adds tuples, NumPy scalars and NumPy arrays. Every value is decoded with its original type.
Encoding raises an error for any other type.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

__all__ = ["NOT_PLAIN", "decode", "encode"]

_TUPLE, _ARRAY, _SCALAR = 1, 2, 3
_KINDS = "biufcSUmM"
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


def _refuse_impostors(value: Any) -> None:
    """Raises ``TypeError`` for types that MessagePack would encode as bytes: ``bytearray`` and ``memoryview``."""
    kind = type(value)
    if kind is bytearray or kind is memoryview:
        raise TypeError(f"{kind.__name__} has no plain form")
    if kind is dict:
        for item in value.values():
            _refuse_impostors(item)
    elif kind is list or kind is tuple:
        for item in value:
            _refuse_impostors(item)


def decode(data: bytes | memoryview) -> Any:
    """Returns the value that :func:`encode` serialized."""
    return msgpack.unpackb(data, ext_hook=_restore, strict_map_key=False, raw=False)


def _extend(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, encode(list(value)))
    if type(value) is np.ndarray and value.dtype.kind in _KINDS and value.dtype.itemsize > 0:
        head = encode([value.dtype.str, list(value.shape)])
        return msgpack.ExtType(_ARRAY, len(head).to_bytes(4, "little") + head + value.tobytes())
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS and value.dtype.itemsize > 0:
        return msgpack.ExtType(_SCALAR, encode([value.dtype.str, value.tobytes()]))
    raise TypeError(f"{type(value).__name__} has no plain form")


def _restore(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(decode(data))
    if code == _ARRAY:
        size = int.from_bytes(data[:4], "little")
        dtype, shape = decode(data[4 : 4 + size])
        if len(data) == 4 + size:
            return np.empty(0, np.dtype(dtype)).reshape(shape)
        return np.frombuffer(data, np.dtype(dtype), offset=4 + size).reshape(shape).copy()
    if code == _SCALAR:
        dtype, raw = decode(data)
        return np.frombuffer(raw, np.dtype(dtype))[0]
    raise TypeError(f"unknown extension {code}")
