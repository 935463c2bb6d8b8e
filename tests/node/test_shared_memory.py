"""Shared memory: blocks without names, semaphores between processes, layouts of spaces."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, create_empty_array
from helpers.examples import examples
from helpers.file_size_limit import file_size_limit
from helpers.kinds import ARRAY_SPACES, OBJECT_SPACES, within
from helpers.testing import assert_identical
from helpers.waiting import shm_names, wait_until
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as st_np

from rayvec.data import tree_map
from rayvec.data.layouts import ArrayLayout, index_tree, split_actions, tree_writer
from rayvec.distributed.allreduce_shared_memory import SharedMemoryRanks
from rayvec.errors import ConfigError
from rayvec.node.chunk_slots import ChunkSlot
from rayvec.node.shared_memory import Semaphore, SharedBlock

FIELDS = {"a": (np.int64, (3, 2)), "odd": (np.bool_, (5,)), "scalar": (np.float32, ()), "none": (np.int8, (0, 4))}


class TestSharedBlock:
    def test_both_sides_see_the_same_zeros_then_the_same_values(self) -> None:
        block = SharedBlock(FIELDS)
        other = SharedBlock(FIELDS, os.dup(block.fd))
        for name, (dtype, shape) in FIELDS.items():
            assert_identical(other.arrays[name], np.zeros(shape, dtype))
            block.arrays[name][...] = np.ones(shape, dtype)
            assert_identical(other.arrays[name], np.ones(shape, dtype))
        block.close()
        other.close()

    @given(
        st.lists(st.tuples(st_np.scalar_dtypes(), st_np.array_shapes(min_dims=0, max_dims=3, min_side=0)), max_size=6)
    )
    @examples(50)
    def test_arrays_are_aligned_and_do_not_overlap(self, fields: list[Any]) -> None:
        block = SharedBlock({str(i): field for i, field in enumerate(fields)})
        arrays = list(block.arrays.values())
        for i, array in enumerate(arrays):
            assert array.flags.aligned and array.flags.writeable and array.flags.c_contiguous
            assert not any(np.shares_memory(array, other) for other in arrays[:i])
        del arrays
        block.close()

    def test_it_has_no_name_and_leaves_nothing(self) -> None:
        gc.collect()  # what earlier tests left is not counted
        fds, names = len(os.listdir("/proc/self/fd")), shm_names()
        block = SharedBlock(FIELDS)
        wait_until(lambda: shm_names() <= names, "it has no name")
        assert not os.get_inheritable(block.fd)
        kept = block.arrays["a"]
        block.close()
        block.close()
        kept[:] = 7  # an array that somebody still holds stays good
        del block, kept
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == fds
        assert "memfd:rayvec" not in Path("/proc/self/maps").read_text()

    def test_addresses_are_those_of_rows(self) -> None:
        block = SharedBlock(FIELDS)
        for row in range(3):
            assert block.address("a", row) == block.arrays["a"][row].ctypes.data
        block.close()


class TestSemaphore:
    @pytest.fixture
    def pair(self) -> Any:
        """The same semaphore through two mappings, as two processes have it."""
        fields = {"s": (np.uint8, (1, Semaphore.SIZE))}
        block = SharedBlock(fields)
        other = SharedBlock(fields, os.dup(block.fd))
        yield Semaphore(block.address("s"), initialise=True), Semaphore(other.address("s"), initialise=False)
        block.close()
        other.close()

    def test_counts(self, pair: tuple[Semaphore, Semaphore]) -> None:
        ours, theirs = pair
        assert not theirs.try_acquire()
        for _ in range(3):
            ours.post()
        assert [theirs.try_acquire() for _ in range(4)] == [True, True, True, False]

    @pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.01, 1.3e-9])
    def test_gives_up_in_the_end(self, pair: tuple[Semaphore, Semaphore], timeout_s: float) -> None:
        assert within(20.0, lambda: pair[1].acquire(timeout_s)) is False
        pair[0].post()
        assert pair[1].acquire(timeout_s) is True

    def test_wakes_who_waits(self, pair: tuple[Semaphore, Semaphore]) -> None:
        ours, theirs = pair
        thread = threading.Timer(0.05, ours.post)
        thread.start()
        assert theirs.acquire(20.0)
        thread.join()

    def test_wakes_another_process(self, pair: tuple[Semaphore, Semaphore]) -> None:
        ours, theirs = pair
        child = os.fork()
        if child == 0:
            os._exit(0 if theirs.acquire(20.0) else 1)
        ours.post()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestLayout:
    @pytest.mark.parametrize("kind", ARRAY_SPACES)
    def test_it_is_gymnasiums_batch(self, kind: str) -> None:
        space = ARRAY_SPACES[kind]
        layout = ArrayLayout.of(space)
        assert layout is not None
        assert_identical(layout.empty((3,)), create_empty_array(space, 3, np.zeros))
        block = SharedBlock(layout.fields("obs", (3,)))
        assert_identical(tree_map(np.array, layout.select(block.arrays, "obs")), layout.empty((3,)))
        block.close()

    @pytest.mark.parametrize("kind", OBJECT_SPACES)
    def test_what_is_no_array_has_none(self, kind: str) -> None:
        assert ArrayLayout.of(OBJECT_SPACES[kind]) is None

    @pytest.mark.parametrize("kind", ARRAY_SPACES)
    def test_rows_that_were_written_are_read_again(self, kind: str) -> None:
        space = ARRAY_SPACES[kind]
        layout = ArrayLayout.of(space)
        assert layout is not None
        tree = layout.empty((4,))
        write = tree_writer(tree)
        space.seed(3)
        samples = [space.sample() for _ in range(4)]
        for row in (2, 0, 3, 1):
            write(row, samples[row])
        for row in range(4):
            assert_identical(tree_map(np.asarray, index_tree(tree, row)), tree_map(np.asarray, samples[row]))

    @pytest.mark.parametrize("kind", ARRAY_SPACES)
    def test_batches_are_split_as_gymnasium_splits_them(self, kind: str) -> None:
        from gymnasium.vector.utils import iterate

        batched = batch_space(ARRAY_SPACES[kind], 3)
        actions = batched.sample()
        assert_identical(list(split_actions(actions, 3)), list(iterate(batched, actions)))

    def test_flattening_goes_by_the_space_not_by_the_value(self) -> None:
        layout = ArrayLayout.of(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}))
        assert layout is not None
        assert layout.flatten({"b": 2, "a": 1}) == [1, 2]

    def test_a_value_that_does_not_fit_is_refused(self) -> None:
        tree = ArrayLayout.of(spaces.Box(-1.0, 1.0, (3,), np.float32)).empty((2,))  # type: ignore[union-attr]
        before = tree.copy()
        for value in (np.zeros(1), np.zeros((3, 1)), 0.5, np.zeros(4)):
            with pytest.raises(ValueError, match="Correct the environment"):
                tree_writer(tree)(0, value)
        counts = ArrayLayout.of(spaces.Discrete(5)).empty((2,))  # type: ignore[union-attr]
        with pytest.raises(TypeError, match="Correct the environment"):
            tree_writer(counts)(0, 1.5)
        assert_identical(tree, before)
        places = {"a": tree, "b": (tree, tree)}
        for value in ({"b": (tree[0],) * 2}, (tree[0],), None, {"a": tree[0], "b": (tree[0],)}, {"a": tree[0], "b": 3}):
            with pytest.raises(ValueError, match="Correct the environment"):
                tree_writer(places)(0, value)

    def test_a_value_of_which_one_part_fits_changes_nothing(self) -> None:
        places = {"a": np.zeros((2, 1)), "b": (np.zeros((2, 1)), np.full(2, None, object))}
        for value in ({"a": np.ones(1), "b": (np.ones(5), "x")}, {"a": np.ones(1), "b": (np.ones(1),)}):
            with pytest.raises(ValueError, match="Correct the environment"):
                tree_writer(places)(0, value)
        assert_identical(places, {"a": np.zeros((2, 1)), "b": (np.zeros((2, 1)), np.full(2, None, object))})

    def test_objects_are_kept_as_they_are_and_as_they_were(self) -> None:
        array = np.full(3, None, dtype=object)
        write = tree_writer(array)
        value = {"x": np.arange(3)}
        for row, item in enumerate((value, [1, 2], np.arange(2))):
            write(row, item)
        value["x"][:] = -1
        assert_identical(array[0], {"x": np.arange(3)})
        assert_identical(array[1], [1, 2])
        assert_identical(array[2], np.arange(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SharedBlock({"a": (np.uint8, (1000,))}),
        lambda: ChunkSlot().prepare(np.zeros(1000, np.float32), 1 << 16),
        lambda: SharedMemoryRanks(0, 1),
    ],
    ids=["SharedBlock", "ChunkSlot", "SharedMemoryRanks"],
)
def test_a_limit_on_the_size_of_files_is_an_error_with_a_remedy(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"a limit of 100 bytes. Remedy: .*ulimit -f"), file_size_limit(100):
        make()
