"""Objects whose large arrays lie in shared memory: as they were, written once, and two of them at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from helpers.examples import examples
from helpers.testing import assert_identical
from helpers.waiting import shm_names, wait_until
from hypothesis import given, strategies as st

from rayvec.node.chunk_memory import ChunkMemory
from rayvec.node.messages import dumps

DTYPES = st.sampled_from(["u1", "f4", "f8", "?"])
SIZES = st.sampled_from([0, 1, 63, 4096, 32768, 50_000])


def reader_of(writer: ChunkMemory) -> ChunkMemory:
    """The same memory as another process has it."""
    return ChunkMemory([os.dup(fd) for fd in writer.fds])


@pytest.fixture
def ends() -> Iterator[tuple[ChunkMemory, ChunkMemory]]:
    with closing(ChunkMemory()) as writer, closing(reader_of(writer)) as reader:
        yield writer, reader


@examples(40)
@given(
    rounds=st.lists(st.lists(st.tuples(DTYPES, SIZES, st.booleans()), max_size=4), min_size=1, max_size=7),
    bulk=st.booleans(),
)
def test_the_last_two_are_as_they_were(rounds: list[Any], bulk: bool) -> None:
    """Whatever their sizes, and whether or not their arrays were allocated in the memory."""
    rng = np.random.default_rng(0)
    with closing(ChunkMemory()) as writer, closing(reader_of(writer)) as reader:
        before = None
        for number, arrays in enumerate(rounds):
            value: dict[str, Any] = {"text": "x", "arrays": []}
            writer.begin(number % 2)
            for dtype, size, inside in arrays:
                array = (writer.empty if inside else np.empty)((size,), np.dtype(dtype))
                array[:] = rng.integers(0, 2, size)
                value["arrays"].append(array)
            expected = {"text": "x", "arrays": [array.copy() for array in value["arrays"]]}
            packed = writer.pack(value, bulk=bulk)
            if before is not None:
                assert_identical(reader.unpack(before[0]), before[1])
            assert_identical(reader.unpack(packed), expected)
            before = packed, expected


def test_what_is_allocated_there_is_not_copied(ends: tuple[ChunkMemory, ChunkMemory]) -> None:
    writer, reader = ends
    other = np.arange(10_000.0)
    writer.begin(0)
    writer.pack([np.zeros(50_000), other])
    writer.begin(0)
    array = writer.empty((25, 2_000), np.float64)
    array[:] = 1
    theirs, copied = reader.unpack(writer.pack([array, other]))
    array[:] = 2
    assert theirs.shape == (25, 2_000) and (theirs == 2).all() and (copied == other).all()


def test_another_writer_continues_in_the_same_memory(ends: tuple[ChunkMemory, ChunkMemory]) -> None:
    writer, reader = ends
    writer.begin(0)
    first = writer.pack(np.full(20_000, 1.0))
    size = os.fstat(writer.fds[1]).st_size
    with closing(reader_of(writer)) as successor:
        successor.begin(1)
        second = successor.pack(np.full(20_000, 2.0))
    assert (reader.unpack(first) == 1).all() and (reader.unpack(second) == 2).all()
    assert size == 0 and os.fstat(writer.fds[1]).st_size == 160_000


def test_arrays_that_are_not_contiguous(ends: tuple[ChunkMemory, ChunkMemory]) -> None:
    writer, reader = ends
    large = np.arange(200_000.0).reshape(400, 500)
    for array in (large.T, large[::2], large[:, ::3], np.asfortranarray(large)[:, 1:]):
        writer.begin(0)
        assert (reader.unpack(writer.pack([array]))[0] == array).all()


def test_functions_and_local_classes_go_by_value(ends: tuple[ChunkMemory, ChunkMemory]) -> None:
    class Local:
        x = 3

    writer, reader = ends
    function, local, array = reader.unpack(writer.pack((lambda: 5, Local(), np.ones(50_000))))
    assert (function(), local.x) == (5, 3) and (array == 1).all()


def test_what_can_not_be_pickled_is_an_error(ends: tuple[ChunkMemory, ChunkMemory]) -> None:
    writer, reader = ends
    with pytest.raises(Exception, match="pickle"):
        writer.pack((np.zeros(50_000), (i for i in range(3))))
    with pytest.raises(Exception, match="pickle"):
        dumps(i for i in range(3))
    writer.begin(0)
    assert (reader.unpack(writer.pack(np.ones(50_000))) == 1).all()


def test_descriptors_are_given_back_and_arrays_stay() -> None:
    fds, names = len(os.listdir("/proc/self/fd")), shm_names()
    with closing(ChunkMemory()) as writer, closing(reader_of(writer)) as reader:
        for size in (60_000, 70_000, 80_000, 1, 90_000):
            writer.begin(0)
            array = reader.unpack(writer.pack(np.full(size, 7)))
        wait_until(lambda: shm_names() <= names, "it has no name")
    assert array.shape == (90_000,) and (array == 7).all()
    del array
    assert len(os.listdir("/proc/self/fd")) == fds
