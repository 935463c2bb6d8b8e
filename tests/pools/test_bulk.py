"""Objects between processes: small ones in the pipe, large arrays in shared memory, and both as they were."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayvec.pools.bulk import BulkReceiver, BulkSender
from rayvec.testing import assert_identical


@pytest.fixture
def ends() -> Iterator[tuple[BulkSender, BulkReceiver]]:
    ours, theirs = multiprocessing.Pipe()
    sender, receiver = BulkSender(ours), BulkReceiver(theirs)
    yield sender, receiver
    receiver.close()
    ours.close()
    theirs.close()


@settings(max_examples=30, deadline=None)
@given(
    rounds=st.lists(
        st.lists(
            st.tuples(st.sampled_from(["u1", "f4", "f8", "?"]), st.sampled_from([0, 1, 63, 4096, 32768, 50_000])),
            max_size=4,
        ),
        min_size=1,
        max_size=5,
    ),
    bulk=st.booleans(),
)
def test_arrays_of_any_size_in_any_order(rounds: list[Any], bulk: bool) -> None:
    ours, theirs = multiprocessing.Pipe()
    sender, receiver = BulkSender(ours), BulkReceiver(theirs)
    rng = np.random.default_rng(0)
    for arrays in rounds:
        if not bulk and sum(np.dtype(dtype).itemsize * size for dtype, size in arrays) > 60_000:
            continue  # would not fit into a pipe that nobody reads
        value = {"arrays": [rng.integers(0, 2, size).astype(dtype) for dtype, size in arrays], "text": "x"}
        sender.send(value, bulk=bulk)
        assert_identical(receiver.recv(), value)
    receiver.close()
    ours.close()
    theirs.close()


def test_arrays_that_are_not_contiguous(ends: tuple[BulkSender, BulkReceiver]) -> None:
    sender, receiver = ends
    large = np.arange(200_000.0).reshape(400, 500)
    for array in (large.T, large[::2], large[:, ::3], np.asfortranarray(large)[:, 1:]):
        thread = threading.Thread(target=sender.send, args=([array],), kwargs={"bulk": True})
        thread.start()
        assert (receiver.recv()[0] == array).all()
        thread.join()


def test_functions_and_local_classes_go_by_value(ends: tuple[BulkSender, BulkReceiver]) -> None:
    class Local:
        x = 3

    sender, receiver = ends
    sender.send((lambda: 5, Local()))
    function, local = receiver.recv()
    assert (function(), local.x) == (5, 3)


def test_what_can_not_be_pickled_is_an_error_and_nothing_is_sent(ends: tuple[BulkSender, BulkReceiver]) -> None:
    sender, receiver = ends
    with pytest.raises(Exception, match="pickle"):
        sender.send((np.zeros(50_000), (i for i in range(3))), bulk=True)
    sender.send("next")
    assert receiver.recv() == "next"


def test_what_is_allocated_for_sending_is_not_copied(ends: tuple[BulkSender, BulkReceiver]) -> None:
    sender, receiver = ends
    other = np.arange(10_000.0)
    for size in (50_000, 50_000, 90_000, 60_000):
        ours, small = sender.empty((size // 8,), np.float64), sender.empty((3,), np.int32)
        ours[:], small[:] = size, size
        sender.send((ours, other, small), bulk=True)
        theirs, copied, few = receiver.recv()
        assert (theirs == size).all() and (copied == other).all() and (few == size).all()
    ours = sender.empty((7_500,), np.float64)
    ours[:] = 1
    sender.send((ours, other), bulk=True)
    theirs, copied = receiver.recv()
    ours[:] = 2
    assert (theirs == 2).all() and (copied == other).all()


def test_what_is_allocated_and_not_sent_is_forgotten(ends: tuple[BulkSender, BulkReceiver]) -> None:
    sender, receiver = ends
    sender.send(np.zeros(10_000), bulk=True)
    receiver.recv()
    for _ in range(3):
        array = sender.empty((10_000,), np.float64)
        with pytest.raises(Exception, match="pickle"):
            sender.send((array, (i for i in range(3))), bulk=True)
    array = sender.empty((10_000,), np.float64)
    array[:] = 3
    sender.send(array, bulk=True)
    theirs = receiver.recv()
    array[:] = 4
    assert (theirs == 4).all()


def test_blocks_are_given_back(ends: tuple[BulkSender, BulkReceiver]) -> None:
    sender, receiver = ends
    sender.send(np.zeros(50_000), bulk=True)
    receiver.recv()
    fds = len(os.listdir("/proc/self/fd"))
    for size in (60_000, 70_000, 80_000, 1, 90_000):
        sender.send(np.zeros(size), bulk=True)
        assert receiver.recv().shape == (size,)
    assert len(os.listdir("/proc/self/fd")) == fds
