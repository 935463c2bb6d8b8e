"""Infos of a chunk come back as they went in, whatever they hold."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    st.integers(-9, 9).map(np.longlong),
    st.booleans().map(np.bool_),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=3),
    st.none(),
]
ARRAYS = [
    st.integers(0, 9).map(lambda x: np.full(3, x)),
    st.integers(0, 9).map(lambda x: np.full((2, 2), x, np.float32)),
    st.integers(0, 9).map(lambda x: np.full(2, x, ">i4")),
    st.integers(0, 9).map(np.array),
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
        ChunkInfo(t, n, {key: draw(kinds[key]) for key in draw(st.lists(st.sampled_from(list(kinds)), unique=True))})
        for t, n in places
    ]


@given(said=infos())
def test_what_went_in_comes_out(said: list[ChunkInfo]) -> None:
    kept = ChunkInfos.of(said)
    assert len(kept) == len(said)
    assert_identical(tuple(kept), tuple(said))
    assert_identical(tuple(pickle.loads(pickle.dumps(kept))), tuple(pickle.loads(pickle.dumps(said))))


@given(left=infos(), right=infos())
def test_chunks_side_by_side(left: list[ChunkInfo], right: list[ChunkInfo]) -> None:
    joined = ChunkInfos.join([ChunkInfos.of(left), ChunkInfos.of(right)], [0, 4])
    expected = sorted([*left, *(info._replace(n=info.n + 4) for info in right)], key=lambda info: info[:2])
    assert_identical(tuple(joined), tuple(expected))
    assert_identical(tuple(joined.between(0, 4)), tuple(left))
    assert_identical(tuple(joined.between(4, 8)), tuple(right))


def test_what_is_alike_is_one_array() -> None:
    said = [ChunkInfo(t, n, {"x": np.float64(t), "mask": np.zeros(6, np.int8)}) for t in range(3) for n in range(2)]
    joined = ChunkInfos.join([ChunkInfos.of(said), ChunkInfos.of(said)], [0, 2])
    (block,) = joined.blocks
    assert block.columns["x"].values.dtype == np.float64
    assert block.columns["mask"].values.shape == (12, 6)


def test_the_reader_owns_what_he_reads() -> None:
    """Also where the columns came by Ray, whose arrays can't be written."""
    said = [ChunkInfo(0, n, {"same": np.zeros(2), "any": [np.zeros(n)], "at": np.array(1.0)}) for n in range(3)]
    kept = ChunkInfos.of(said)
    columns = kept.blocks[0].columns
    for array in (columns["same"].values, *columns["at"].values, *(arrays[0] for arrays in columns["any"].values)):
        array.flags.writeable = False
    for info in kept:
        info.info["same"][:] = info.info["any"][0][:] = 1.0
        info.info["at"][...] = 2.0
    assert_identical(kept.blocks[0].columns["same"].values, np.zeros((3, 2)))


def test_nothing_is_made_before_it_is_read() -> None:
    kept = ChunkInfos.of([ChunkInfo(0, 0, {"x": 1.0})])
    assert kept[0] is kept[0]
    assert kept == [ChunkInfo(0, 0, {"x": 1.0})] and kept == (ChunkInfo(0, 0, {"x": 1.0}),)
    assert kept != [] and kept != 1
    assert kept[-1:] == (kept[0],)
    with pytest.raises(TypeError, match="unhashable"):
        hash(kept)


def test_of_nothing() -> None:
    nothing: Any = ChunkInfos.of([])
    assert not nothing and nothing == () and ChunkInfos.join([nothing, nothing], [0, 3]) == ()


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    rows: Any


@pytest.mark.parametrize("wrap", [lambda x: Pair(x, 1), lambda x: OrderedDict(a=x), Record, lambda x: [{"a": (x,)}]])
def test_arrays_can_be_written_in_whatever_came_by_ray(ray_cluster: object, wrap: Any) -> None:
    said = [ChunkInfo(0, 0, {"x": wrap(np.arange(5))})]
    came = ray.get(ray.put(ChunkInfos.of(said)))
    assert_identical(vars_of(came[0].info["x"]), vars_of(said[0].info["x"]))
    (array,) = arrays_in(came[0].info["x"])
    array += 1
    (again,) = arrays_in(came[0].info["x"])
    assert again.tolist() == [1, 2, 3, 4, 5]


def vars_of(value: Any) -> Any:
    return vars(value) if isinstance(value, Record) else value


def arrays_in(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return [value]
    items = vars_of(value)
    items = items.values() if isinstance(items, dict) else items if isinstance(items, (list, tuple)) else ()
    return [array for item in items for array in arrays_in(item)]
