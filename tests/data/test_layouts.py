"""Layouts of spaces in arrays."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, create_empty_array
from helpers.kinds import ARRAY_SPACES
from helpers.testing import assert_identical

from rayvec.data import tree_map
from rayvec.data.layouts import ArrayLayout, index_tree, split_actions, tree_writer


class TestLayout:
    @pytest.mark.parametrize("kind", ARRAY_SPACES)
    def test_it_is_gymnasiums_batch(self, kind: str) -> None:
        space = ARRAY_SPACES[kind]
        layout = ArrayLayout.of(space)
        assert layout is not None
        assert_identical(layout.empty((3,)), create_empty_array(space, 3, np.zeros))
        fields = layout.fields("obs", (3,))
        arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in fields.items()}
        assert_identical(layout.select(arrays, "obs"), layout.empty((3,)))

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
