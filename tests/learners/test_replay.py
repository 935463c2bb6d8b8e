"""The replay against lists of transitions that are put together one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from rayvec.data import Chunk
from rayvec.errors import CheckpointError, ConfigError
from rayvec.learners.replay import ReplayBuffer


@dataclass
class World:
    """Makes chunks as environments would: observations are numbers that never come twice."""

    num_envs: int
    obs_shape: tuple[int, ...] = (2,)
    dtype: Any = np.float32

    def __post_init__(self) -> None:
        self._count = 0
        self.now = self.draw(self.num_envs)

    def draw(self, count: int) -> NDArray[Any]:
        values = np.arange(self._count, self._count + count)
        self._count += count
        return np.broadcast_to(values.reshape(-1, *[1] * len(self.obs_shape)), (count, *self.obs_shape)).astype(
            self.dtype
        )

    def chunk(self, num_steps: int, kinds: NDArray[np.int64]) -> Chunk:
        """Kinds ``[T, N]``: 0 goes on, 1 terminates, 2 is truncated, 3 did not happen and begins anew."""
        n = self.num_envs
        obs, valid = [], kinds != 3
        terminated, truncated = kinds == 1, kinds == 2
        finals: dict[tuple[int, int], NDArray[Any]] = {}
        for t in range(num_steps):
            obs.append(self.now.copy())
            nxt = self.draw(n)
            for i in range(n):
                if kinds[t, i] in (1, 2):
                    finals[t, i] = nxt[i].copy()
                    nxt[i] = self.draw(1)[0]
                elif kinds[t, i] == 3 and t > 0 and kinds[t - 1, i] == 0:  # the step before it is cut
                    truncated[t - 1, i] = True
                    finals[t - 1, i] = obs[t][i].copy()
            self.now = nxt
        places = sorted(finals)
        return Chunk(
            env_ids=np.arange(n),
            obs=np.stack(obs),
            act=self.draw(num_steps * n).reshape(num_steps, n, -1)[..., :1].astype(np.float64),
            rew=self.draw(num_steps * n).reshape(num_steps, n, -1)[..., 0].astype(np.float64),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            last_obs=self.now.copy(),
            final_index=np.array(places, np.int64).reshape(-1, 2),
            final_obs=np.array([finals[place] for place in places], self.dtype).reshape(-1, *self.obs_shape),
        )


class Lists:
    """The slow reference: of each environment the last transitions, put together by `Chunk.next_obs`."""

    def __init__(self, capacity: int, num_envs: int) -> None:
        self._capacity = capacity
        self.columns: list[list[tuple[Any, ...]]] = [[] for _ in range(num_envs)]

    def add(self, chunk: Chunk) -> None:
        next_obs = chunk.next_obs()
        for n, column in enumerate(self.columns):
            for t in range(chunk.num_steps):
                if chunk.valid[t, n]:
                    row = (chunk.obs[t, n], chunk.act[t, n], chunk.rew[t, n], next_obs[t, n], chunk.terminated[t, n])
                    column.append(row)
            del column[: -self._capacity]


def everything(replay: ReplayBuffer) -> Any:
    columns = np.repeat(np.arange(len(replay.sizes)), replay.sizes)
    ages = np.concatenate([np.zeros(0, np.int64), *map(np.arange, replay.sizes)])
    return replay.sample(ages, columns)


def assert_equal(replay: ReplayBuffer, lists: Lists) -> None:
    assert replay.sizes.tolist() == [len(column) for column in lists.columns]
    rows = [row for column in lists.columns for row in column]
    if not rows:
        return
    got = everything(replay)
    for name, expected in zip(("obs", "act", "rew", "next_obs", "terminated"), zip(*rows, strict=True), strict=True):
        np.testing.assert_array_equal(got[name], np.array(expected), name)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[tuple[NDArray[np.int64], bool]]]:
    capacity, num_envs = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        num_steps = draw(st.integers(1, 9))
        kinds = draw(
            st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=num_steps * num_envs, max_size=num_steps * num_envs)
        )
        parts.append((np.array(kinds).reshape(num_steps, num_envs), draw(st.booleans())))
    return capacity, num_envs, parts


@examples(150)
@given(histories())
def test_it_holds_what_lists_hold(history: tuple[int, int, list[tuple[NDArray[np.int64], bool]]]) -> None:
    capacity, num_envs, parts = history
    world, replay, lists = World(num_envs), ReplayBuffer(capacity), Lists(capacity, num_envs)
    for kinds, begin_anew in parts:
        if begin_anew:  # all environments are reset between two chunks
            world.now = world.draw(num_envs)
        chunk = world.chunk(len(kinds), kinds)
        replay.add(chunk)
        lists.add(chunk)
        assert_equal(replay, lists)
        other = ReplayBuffer(capacity)
        other.load_state_dict(replay.state_dict())
        assert_equal(other, lists)
        replay = other  # goes on from its own state


def test_what_can_not_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capacity_steps is 0.*at least 1"):
        ReplayBuffer(0)
    replay = ReplayBuffer(8)
    replay.add(World(1).chunk(8, np.zeros((8, 1), np.int64)))
    with pytest.raises(ConfigError, match=r"environments \[0, 1\].*\[0\]"):
        replay.add(World(2).chunk(1, np.zeros((1, 2), np.int64)))
    with pytest.raises(CheckpointError, match="has 8 steps of each environment, and this one 4"):
        ReplayBuffer(4).load_state_dict(replay.state_dict())
    ReplayBuffer(16).load_state_dict(replay.state_dict())
    replay.add(World(1).chunk(1, np.zeros((1, 1), np.int64)))
    with pytest.raises(CheckpointError, match="has 8 steps of each environment, and this one 16"):
        ReplayBuffer(16).load_state_dict(replay.state_dict())
