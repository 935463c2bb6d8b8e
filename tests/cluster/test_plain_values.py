"""Plain values survive the way as they are; everything else is refused; nothing is ever unpickled."""

from __future__ import annotations

import collections
import enum
import inspect
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from helpers.examples import examples
from helpers.testing import assert_identical
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as st_np

from rayvec.cluster import plain_values, tcp_stream, wire_format

dtypes = st.one_of(
    st_np.boolean_dtypes(),
    st_np.integer_dtypes(),
    st_np.unsigned_integer_dtypes(),
    st_np.floating_dtypes(),
    st_np.complex_number_dtypes(),
    st_np.datetime64_dtypes(),
    st_np.timedelta64_dtypes(),
    st_np.unicode_string_dtypes(),
    st_np.byte_string_dtypes(),
)
arrays = st_np.arrays(dtypes, st_np.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
scalars = arrays.filter(lambda array: array.size > 0).map(lambda array: array.flat[0])
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | arrays
    | scalars.filter(lambda scalar: isinstance(scalar, np.generic)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9) | st.tuples(st.integers(0, 3)), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_tuples_that_are_nested_too_deeply() -> None:
    """Reading them would overflow the stack of the process, which ends it."""
    for depth in (31, 32, 33, 1000):
        for inside in ("text", np.float32(1), np.zeros(2), {(1,): ()}):
            value: Any = inside
            for _ in range(depth - isinstance(inside, dict)):
                value = (value,)
            for each in (value, {value: 1}) if isinstance(inside, str) else (value,):
                if depth <= 32:
                    assert_identical(plain_values.decode(plain_values.encode(each)), each)
                else:
                    with pytest.raises(plain_values.NOT_PLAIN):
                        plain_values.encode(each)
        data = b"\xa0"
        for _ in range(depth):
            data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
        if depth > 32:
            with pytest.raises(ValueError, match="32 tuples"):
                plain_values.decode(data)
    data = msgpack.packb("<f4")
    for _ in range(1000):  # a head of an array is none itself
        data = msgpack.packb(msgpack.ExtType(3, b"\x92" + data + b"\xc4\x00"))
    with pytest.raises((TypeError, ValueError)):
        plain_values.decode(data)


@examples(200)
@given(value=plain)
def test_plain_values_come_back_with_type_and_data_type(value: Any) -> None:
    try:
        data = plain_values.encode(value)
    except plain_values.NOT_PLAIN:  # a scalar text of no characters has no data type that NumPy reads back
        assert has_empty_text(value)
        return
    assert_identical(plain_values.decode(data), value)


def has_empty_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_empty_text, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_empty_text, value))
    return isinstance(value, (np.generic, np.ndarray)) and value.dtype.itemsize == 0


@given(array=arrays.filter(lambda array: array.dtype.itemsize > 0))
def test_arrays_come_back_in_memory_of_their_own(array: Any) -> None:
    data = plain_values.encode(array)
    first, second = plain_values.decode(data), plain_values.decode(data)
    assert first.flags.writeable and first.flags.aligned and not np.shares_memory(first, second)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = (value,) if levels % 2 else [value]
    return value


REFUSED = {
    "set": {1},
    "object": object(),
    "function": len,
    "enum": Colour.RED,
    "text of another type": Text("x"),
    "ordered dict": collections.OrderedDict(a=1),
    "named tuple": collections.namedtuple("Point", "x")(1),
    "bytearray": bytearray(b"x"),
    "memoryview": memoryview(b"x"),
    "array of objects": np.array([object()]),
    "structured array": np.zeros(2, [("a", np.int8)]),
    "masked array": np.ma.masked_array([1, 2], [True, False]),
    "matrix of its own type": np.zeros(2).view(type("Mine", (np.ndarray,), {})),
    "int of 65 bits": 2**64,
    "negative int of 65 bits": -(2**63) - 1,
    "half a character": "\ud800",
    "endless": endless(),
    "deep list": deep(3000),
    "deep tuple": deep(3001),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("place", ["alone", "in a list", "in a tuple", "in a dict"])
def test_what_is_not_plain_is_refused_wherever_it_stands(what: str, place: str) -> None:
    value = REFUSED[what]
    placed = {"alone": value, "in a list": [1, value], "in a tuple": (value,), "in a dict": {"x": {"y": value}}}[place]
    with pytest.raises(plain_values.NOT_PLAIN):
        plain_values.encode(placed)


@examples(200)
@given(data=st.binary(max_size=64))
def test_garbage_is_a_value_or_an_error_never_more(data: bytes) -> None:
    try:
        value = plain_values.decode(data)
    except Exception as error:
        assert not isinstance(error, (MemoryError, SystemError))
    else:
        assert_identical(plain_values.decode(plain_values.encode(value)), value)


def test_what_arrives_is_never_unpickled(tmp_path: Any) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "owned"), "w")

    for data in (pickle.dumps(Evil()), plain_values.encode([pickle.dumps(Evil())])):
        try:
            plain_values.decode(data)
        except Exception as error:
            assert not isinstance(error, pickle.UnpicklingError)
    assert not (tmp_path / "owned").exists()
    for module in (wire_format, plain_values, tcp_stream):
        names = set(vars(module)) | set(
            inspect.getsource(module).replace("unpickled", "").replace("pickled", "").split()
        )
        assert not {"pickle", "cloudpickle", "marshal", "eval", "exec"} & names, module
