"""The tools of the tests: comparisons see every difference, and environments do what tests expect of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.exact import TablePolicy
from helpers.fleet_kit import reset_with, stepper_of
from helpers.testing import CountingEnv, assert_identical, counting_errors

from rayvec.data import Chunk
from rayvec.rollout.loop import rollout

VALUES: list[Any] = [
    None,
    True,
    1,
    1.0,
    "1",
    b"1",
    (1,),
    [1],
    {"a": 1},
    {"b": 1},
    {"a": 2},
    np.int64(1),
    np.int32(1),
    np.float64(1.0),
    np.array(1),
    np.array([1]),
    np.array([1], np.int32),
    np.array([[1]]),
    np.array([2]),
    np.array([1], object),
    np.array([0.0]),
    np.array([-0.0]),
]


def test_identity_is_of_types_data_types_shapes_and_bits() -> None:
    for i, a in enumerate(VALUES):
        for j, b in enumerate(VALUES):
            if i == j:
                assert_identical(a, b)
            else:
                with pytest.raises(AssertionError):
                    assert_identical(a, b)
                with pytest.raises(AssertionError):
                    assert_identical({"x": [1, (a,)]}, {"x": [1, (b,)]})
    assert_identical(float("nan"), float("nan"))
    with pytest.raises(AssertionError):
        assert_identical({"a": 1, "b": 2}, {"b": 2, "a": 1})


class TestCounting:
    @pytest.fixture
    def chunks(self) -> list[Chunk]:
        pool = stepper_of([CountingEnv] * 2)
        reset_with(pool, [0, 1])
        return [rollout(pool, TablePolicy(), 20) for _ in range(2)]

    def test_what_is_right_is_right(self, chunks: list[Chunk]) -> None:
        assert counting_errors(chunks) == []

    def test_every_kind_of_lie_is_seen(self, chunks: list[Chunk]) -> None:
        first, second = chunks
        end = first.final_index[0].tolist()
        nothing = np.zeros_like(first.terminated)

        def changed(name: str, at: Any, by: int = 1) -> Chunk:
            array = getattr(first, name).copy()
            array[at] += by
            return replace(first, **{name: array})

        joined = replace(first, terminated=nothing, truncated=nothing, final_index=np.zeros((0, 2), int))
        lies = {
            "two episodes are joined": [replace(joined, final_obs=first.final_obs[:0])],
            "the final observation is that of the next episode": [changed("final_obs", (0, 1))],
            "a step is lost": [replace(first, obs=first.obs[1:], rew=first.rew[1:])],
            "a step is doubled": [changed("obs", (slice(5, None), 0, 3), -1)],
            "a reward stands elsewhere": [replace(first, rew=np.roll(first.rew, 1, 0))],
            "environments are mixed up": [replace(first, last_obs=first.last_obs[::-1])],
            "a chunk is lost": [first, rest_of(second)],
            "a chunk is doubled": [first, first],
            "an end is not told": [replace(first, terminated=first.terminated & (np.arange(20) != end[0])[:, None])],
        }
        for name, told in lies.items():
            try:
                seen = counting_errors(told)
            except (IndexError, ValueError):
                continue
            assert seen, name


def rest_of(chunk: Chunk) -> Chunk:
    """The same chunk, which begins one step late."""
    later = chunk.final_index[:, 0] >= 1
    return replace(
        chunk,
        obs=chunk.obs[1:],
        rew=chunk.rew[1:],
        terminated=chunk.terminated[1:],
        truncated=chunk.truncated[1:],
        final_index=chunk.final_index[later] - [1, 0],
        final_obs=chunk.final_obs[later],
    )
