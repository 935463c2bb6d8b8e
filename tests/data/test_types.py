"""The data that travels: trees, chunks, slices."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from helpers.testing import assert_identical
from hypothesis import given, strategies as st

from rayvec.data import Chunk, tree_leaves, tree_map
from rayvec.data.infos import ChunkInfo, ChunkInfos
from rayvec.data.join_chunks import join_chunks

trees = st.recursive(
    st.integers(),
    lambda inner: (
        st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=6,
)


class TestTrees:
    @given(tree=trees)
    def test_map_keeps_the_form_and_leaves_are_in_its_order(self, tree: Any) -> None:
        doubled = tree_map(lambda leaf: 2 * leaf, tree)
        assert [*tree_leaves(doubled)] == [2 * leaf for leaf in tree_leaves(tree)]
        assert tree_map(lambda a, b: b - a, tree, doubled) == tree

    def test_others_go_by_key_not_by_order(self) -> None:
        assert tree_map(lambda a, b: (a, b), {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {"a": (1, 10), "b": (2, 20)}


def make_chunk(obs: Any, last_obs: Any, final_obs: Any, done: Any) -> Chunk:
    steps, envs = done.shape
    return Chunk(
        env_ids=np.arange(envs),
        obs=obs,
        act=np.zeros((steps, envs), int),
        rew=np.zeros((steps, envs)),
        terminated=done,
        truncated=np.zeros_like(done),
        valid=np.ones_like(done),
        last_obs=last_obs,
        final_index=np.argwhere(done),
        final_obs=final_obs,
    )


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


class TestColumns:
    @given(data=st.data(), num_steps=st.integers(1, 4), num_envs=st.integers(1, 6), seed=st.integers(0, 99))
    def test_what_is_cut_joins_again(self, data: Any, num_steps: int, num_envs: int, seed: int) -> None:
        """Wherever it is cut, also into parts without a column."""
        cuts = data.draw(st.lists(st.integers(0, num_envs), max_size=4).map(sorted))
        bounds = [0, *cuts, num_envs]
        chunk = random_chunk(num_steps, num_envs, seed)
        parts = [chunk.columns(start, stop) for start, stop in itertools.pairwise(bounds)]
        assert [part.num_envs for part in parts] == np.diff(bounds).tolist()
        joined = join_chunks(parts)
        for field in dataclasses.fields(Chunk):
            assert_identical(getattr(joined, field.name), getattr(chunk, field.name), field.name)


class TestChunk:
    @given(data=st.data())
    def test_next_obs_is_the_truth(self, data: st.DataObject) -> None:
        """Against an obvious loop; also for trees, and where the last step ends an episode."""
        steps, envs = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
        done = np.array(data.draw(st.lists(st.booleans(), min_size=steps * envs, max_size=steps * envs)))
        done = done.reshape(steps, envs)
        obs = np.arange(steps * envs * 2.0).reshape(steps, envs, 2)
        last_obs, final_obs = 1000.0 + np.arange(envs * 2.0).reshape(envs, 2), -1.0 - np.arange(done.sum() * 2.0)
        final_obs = final_obs.reshape(-1, 2)
        chunk = make_chunk(
            {"a": obs, "b": (obs[..., 0],)},
            {"a": last_obs, "b": (last_obs[..., 0],)},
            {"a": final_obs, "b": (final_obs[..., 0],)},
            done,
        )
        expected = np.zeros_like(obs)
        finals = iter(final_obs)
        for t in range(steps):
            for n in range(envs):
                following = obs[t + 1, n] if t + 1 < steps else last_obs[n]
                expected[t, n] = next(finals) if done[t, n] else following
        before = obs.copy()
        assert_identical(chunk.next_obs(), {"a": expected, "b": (expected[..., 0].copy(),)})
        assert_identical(obs, before)
