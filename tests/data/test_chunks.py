"""Chunks are cut, joined and shifted without a change."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from helpers.testing import assert_identical
from hypothesis import given, strategies as st

from rayvec.data import Chunk
from rayvec.data.infos import ChunkInfo, ChunkInfos
from rayvec.data.join_chunks import join_chunks


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
