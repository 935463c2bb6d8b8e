"""Chunks are cut, joined and shifted without a change."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import numpy as np
from helpers.testing import assert_identical
from hypothesis import given, strategies as st

from rayvec.data import Chunk
from rayvec.data.chunk import ChunkInfo, ChunkInfos, join_chunks


def random_chunk(num_steps: int, num_envs: int, seed: int) -> Chunk:
    """A chunk with something in every field, of a Dict observation and a Tuple action."""
    rng = np.random.default_rng(seed)
    lead = (num_steps, num_envs)
    ended = rng.random(lead) < 0.3
    final_index, restarts = np.argwhere(ended), np.argwhere(rng.random(lead) < 0.2)

    def infos() -> ChunkInfos:
        return ChunkInfos.of(
            ChunkInfo(t, n, {"at": 10 * t + n}) for t, n in np.argwhere(rng.random(lead) < 0.3).tolist()
        )

    return Chunk(
        env_ids=100 + np.arange(num_envs),
        obs={"x": rng.normal(size=(*lead, 2)), "y": (rng.integers(0, 9, lead),)},
        act=(rng.normal(size=lead), rng.integers(0, 9, (*lead, 3))),
        rew=rng.normal(size=lead),
        terminated=ended,
        truncated=rng.random(lead) < 0.1,
        valid=rng.random(lead) < 0.9,
        last_obs={"x": rng.normal(size=(num_envs, 2)), "y": (rng.integers(0, 9, num_envs),)},
        final_index=final_index,
        final_obs={"x": rng.normal(size=(len(final_index), 2)), "y": (rng.integers(0, 9, len(final_index)),)},
        extras={"logp": rng.normal(size=lead)},
        infos=infos(),
        reset_infos=infos(),
        restarts=restarts,
        cuts=np.argwhere(rng.random(lead) < 0.2),
        weights_version=3,
        first_step=7,
    )


@given(data=st.data(), num_steps=st.integers(1, 4), num_envs=st.integers(1, 6), seed=st.integers(0, 99))
def test_what_is_cut_joins_again(data: Any, num_steps: int, num_envs: int, seed: int) -> None:
    """Wherever it is cut, also into parts without a column."""
    cuts = data.draw(st.lists(st.integers(0, num_envs), max_size=4).map(sorted))
    bounds = [0, *cuts, num_envs]
    chunk = random_chunk(num_steps, num_envs, seed)
    parts = [chunk.columns(start, stop) for start, stop in itertools.pairwise(bounds)]
    assert [part.num_envs for part in parts] == np.diff(bounds).tolist()
    joined = join_chunks(parts)
    for field in dataclasses.fields(Chunk):
        assert_identical(getattr(joined, field.name), getattr(chunk, field.name), field.name)


@given(num_steps=st.integers(1, 5), num_envs=st.integers(1, 3), seed=st.integers(0, 99))
def test_next_obs_is_the_truth(num_steps: int, num_envs: int, seed: int) -> None:
    """Against an obvious loop; also for trees, and where the last step ends an episode."""
    chunk = random_chunk(num_steps, num_envs, seed)
    before, expected, ends = chunk.obs["x"].copy(), np.zeros_like(chunk.obs["x"]), chunk.final_index.tolist()
    for t, n in np.ndindex(num_steps, num_envs):
        if [t, n] in ends:
            expected[t, n] = chunk.final_obs["x"][ends.index([t, n])]
        else:
            expected[t, n] = chunk.obs["x"][t + 1, n] if t + 1 < num_steps else chunk.last_obs["x"][n]
    found = chunk.next_obs()
    assert_identical(found["x"], expected)
    assert_identical(chunk.obs["x"], before)
    assert found["y"][0].shape == (num_steps, num_envs)


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
    joined = ChunkInfos.join([kept, ChunkInfos.of(right)], [0, 4, 8])
    beside = [*left, *(info._replace(n=info.n + 4) for info in right)]
    assert_same(joined, sorted(beside, key=lambda info: info[:2]))
    assert_same(joined.between(0, 4), left)
    assert_same(joined.between(4, 8), right)
