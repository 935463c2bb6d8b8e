"""The replay against lists of transitions that are put together one by one."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.examples import examples
from helpers.sac_kit import BOX, N, make_chunk
from hypothesis import given, strategies as st

from rayvec.errors import CheckpointError, ConfigError
from rayvec.learners.replay import ReplayBuffer


def chunk_of(seed: int, num_steps: int) -> Any:
    return make_chunk(BOX, seed, num_steps, invalid=True)


@examples(100)
@given(capacity=st.integers(1, 12), lengths=st.lists(st.integers(1, 15), min_size=1, max_size=6))
def test_it_holds_what_lists_hold(capacity: int, lengths: list[int]) -> None:
    """Also from its own state, which a replay continues after each chunk."""
    replay = ReplayBuffer(capacity)
    lists: list[deque[Any]] = [deque(maxlen=capacity) for _ in range(N)]
    for seed, num_steps in enumerate(lengths):
        chunk = chunk_of(seed, num_steps)
        replay.add(chunk)
        next_obs = chunk.next_obs()
        for t, n in np.argwhere(chunk.valid):
            row = (chunk.obs[t, n], chunk.act[t, n], chunk.rew[t, n], next_obs[t, n], chunk.terminated[t, n])
            lists[n].append(row)
        other = ReplayBuffer(capacity)
        other.load_state_dict(replay.state_dict())
        replay = other
        assert replay.sizes.tolist() == [*map(len, lists)]
        pairs = [(age, n) for n, rows in enumerate(lists) for age in range(len(rows))]
        ages, envs = np.array(pairs, np.int64).reshape(-1, 2).T
        got = replay.sample(ages, envs)
        for k, name in enumerate(("obs", "act", "rew", "next_obs", "terminated") if pairs else ()):
            expected = np.array([row[k] for rows in lists for row in rows])
            np.testing.assert_array_equal(got[name], expected.astype(got[name].numpy().dtype), name)


def test_what_can_not_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capacity_steps is 0.*at least 1"):
        ReplayBuffer(0)
    replay, chunk = ReplayBuffer(8), make_chunk(BOX, 0, 8)
    replay.add(chunk)
    with pytest.raises(ConfigError, match=r"environments \[1, 2, 3, 4\].*\[0, 1, 2, 3\]"):
        replay.add(replace(chunk, env_ids=chunk.env_ids + 1))
    with pytest.raises(CheckpointError, match="has 8 steps of each environment, and this one 4"):
        ReplayBuffer(4).load_state_dict(replay.state_dict())
    ReplayBuffer(16).load_state_dict(replay.state_dict())
    replay.add(make_chunk(BOX, 1, 1))
    with pytest.raises(CheckpointError, match="has 8 steps of each environment, and this one 16"):
        ReplayBuffer(16).load_state_dict(replay.state_dict())
