"""Tianshou's replay buffers, held against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tianshou.data import Batch


def assert_same_values(got: Any, expected: Any, path: str) -> None:
    assert type(got) is type(expected), path
    if isinstance(expected, Batch):
        assert set(got.keys()) == set(expected.keys()), f"{path}: {set(got.keys())} {set(expected.keys())}"
        for key in expected.keys():
            assert_same_values(got[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and torch.equal(got, expected), path
    else:
        assert got.dtype == expected.dtype and got.shape == expected.shape, f"{path}: {got.dtype} {expected.dtype}"
        np.testing.assert_array_equal(got, expected, err_msg=path, strict=True)


def assert_same_rows(got: Any, expected: Any) -> None:
    assert_same_values(got._meta, expected._meta, "meta")


def assert_same_buffer(got: Any, expected: Any) -> None:
    assert_same_rows(got, expected)
    assert len(got) == len(expected)
    np.testing.assert_array_equal(got.last_index, expected.last_index)
    subs = zip(getattr(got, "buffers", [got]), getattr(expected, "buffers", [expected]), strict=True)
    for mine, theirs in subs:
        for name in ("_insertion_idx", "_size", "_ep_return", "_ep_len", "_ep_start_idx", "last_index"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
        assert_same_values(mine._meta, theirs._meta, "sub-buffer")
    if hasattr(expected, "_lengths"):
        np.testing.assert_array_equal(got._lengths, expected._lengths)
    if hasattr(expected, "weight"):
        np.testing.assert_array_equal(got.weight._value, expected.weight._value)
    if not len(expected):
        return
    np.testing.assert_array_equal(got.unfinished_index(), expected.unfinished_index())
    indices = expected.sample_indices(0)
    np.testing.assert_array_equal(got.sample_indices(0), indices)
    if len(indices):
        np.testing.assert_array_equal(got.prev(indices), expected.prev(indices))
        np.testing.assert_array_equal(got.next(indices), expected.next(indices))
        assert_same_values(got[indices], expected[indices], "rows")
