"""Infos of a chunk come back as they went in, but for numbers, which are Python's own."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import ray
from helpers.testing import assert_identical
from hypothesis import given, strategies as st

from rayvec.data.infos import ChunkInfo, ChunkInfos

SCALARS = [
    st.booleans(),
    st.integers(),
    st.floats(),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=3),
    st.none(),
]
ARRAYS = [
    st.integers(0, 9).map(lambda x: np.full(3, x)),
    st.integers(0, 9).map(lambda x: np.full((2, 2), x, np.float32)),
    st.text(max_size=2).map(lambda x: np.array([x])),
    st.integers(0, 3).map(np.zeros),
]
VALUES = st.one_of(*SCALARS, *ARRAYS, st.just({"r": 1.0, "l": [np.zeros(2)]}), st.just((1, "x")))


@st.composite
def infos(draw: st.DrawFn, num_envs: int = 4) -> list[ChunkInfo]:
    """Infos in order; under a key there is mostly one kind of value, and now and then any."""
    kinds = {key: draw(st.sampled_from([*SCALARS, *ARRAYS, VALUES])) for key in ("x", "y", 3)}
    places = sorted(draw(st.sets(st.tuples(st.integers(-1, 5), st.integers(0, num_envs - 1)), max_size=12)))
    return [
        ChunkInfo(t, n, {key: draw(kinds[key]) for key in kinds if draw(st.booleans())})  # in one order
        for t, n in places
    ]


def assert_same(got: ChunkInfos, expected: list[ChunkInfo]) -> None:
    """Numbers are Python's own on both sides, and keys may have another order."""

    def own(item: ChunkInfo) -> Any:
        values = {key: each.item() if isinstance(each, np.generic) else each for key, each in item.info.items()}
        return item.t, item.n, sorted(values.items(), key=str)

    assert_identical([*map(own, got)], [*map(own, expected)])


@given(left=infos(), right=infos())
def test_what_went_in_comes_out(left: list[ChunkInfo], right: list[ChunkInfo]) -> None:
    kept = ChunkInfos.of(left)
    assert len(kept) == len(left)
    assert_same(kept, left)
    assert_same(pickle.loads(pickle.dumps(kept)), left)
    joined = ChunkInfos.join([kept, ChunkInfos.of(right)], [0, 4])
    beside = [*left, *(info._replace(n=info.n + 4) for info in right)]
    assert_same(joined, sorted(beside, key=lambda info: info[:2]))
    assert_same(joined.between(0, 4), left)
    assert_same(joined.between(4, 8), right)


@pytest.mark.parametrize("wrap", [lambda x: [{"a": (x,)}], lambda x: x])
def test_arrays_can_be_written_in_whatever_came_by_ray(ray_cluster: object, wrap: Any) -> None:
    came = ray.get(ray.put(ChunkInfos.of([ChunkInfo(0, 0, {"x": wrap(np.arange(5))})])))
    value = came[0].info["x"]
    array = value if isinstance(value, np.ndarray) else value[0]["a"][0]
    array += 1
    assert array.tolist() == [1, 2, 3, 4, 5]
