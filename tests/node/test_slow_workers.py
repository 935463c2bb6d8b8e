"""Workers whose next step would end too late stop before it; the steps that were asked for are taken all the same."""

from __future__ import annotations

import numpy as np
from helpers.examples import examples
from hypothesis import given, strategies as st

from rayvec.node.slow_workers import EnoughSteps, StepTimes

LOOK_S = 0.001


def take_chunk(
    times: StepTimes, step_s: np.ndarray, num_steps: int, most: int = 1 << 20
) -> tuple[np.ndarray, float, float]:
    """Takes a chunk on a simulated clock; returns steps, when there were enough, and when the last worker ended."""
    stop_at = np.full(len(step_s), np.inf)
    times.begin(0.0)
    for now_s in np.arange(LOOK_S, num_steps * step_s.max() + 2 * LOOK_S, LOOK_S):
        taken = np.minimum(np.floor(now_s / step_s), np.minimum(stop_at, most)).astype(np.int64)
        if taken.sum() >= num_steps:
            ends = np.where(np.isfinite(stop_at), stop_at, taken + 1) * step_s
            return np.where(np.isfinite(stop_at), stop_at, taken + 1), now_s, float(ends.max())
        late = times.too_slow(taken, num_steps, most, now_s) & np.isinf(stop_at)
        stop_at[late] = taken[late] + 1
        assert np.isinf(stop_at[step_s == step_s.min()]).all(), "the fastest workers never stop early"
    raise AssertionError(f"{taken.sum()} of {num_steps} steps at the end")


def test_no_worker_begins_a_step_that_others_would_wait_for() -> None:
    """One of 16 workers is 20 times slower."""
    step_s = np.array([0.1013] + [0.005] * 15)
    times = StepTimes(np.ones(16, np.int64))
    waits = []
    for _ in range(10):
        taken, enough_s, end_s = take_chunk(times, step_s, 16 * 128)
        waits.append(end_s - enough_s)
        assert taken[0] == 6, "the seventh step would end at 0.709 s, and there are enough at 0.681 s"
    assert max(waits) < 0.006


@examples(100)
@given(st.lists(st.floats(0.004, 0.3), min_size=2, max_size=12), st.integers(1, 60))
def test_the_steps_are_taken_and_fast_workers_continue(step_s: list[float], num_steps: int) -> None:
    times, slowness = StepTimes(np.ones(len(step_s), np.int64)), np.array(step_s)
    for _ in range(3):
        take_chunk(times, slowness, num_steps * len(step_s))
    times.begin(0.0)
    none = np.zeros(len(step_s), np.int64)
    assert not times.too_slow(none, 10**9, 1 << 30, 0.001).any(), "there is time enough"


def test_slow_workers_continue_where_the_fast_one_can_not_take_all_steps() -> None:
    """One fast worker may take 64 of 128 steps, so three slow ones take the others."""
    times, step_s = StepTimes(np.ones(4, np.int64)), np.array([0.002, 0.2, 0.2, 0.2])
    for _ in range(3):
        taken, _, _ = take_chunk(times, step_s, 128, most=64)
        assert np.minimum(taken, 64).sum() >= 128 and taken[1:].min() >= 21


def test_equal_workers_end_together() -> None:
    times = StepTimes(np.full(4, 2, np.int64))
    times.begin(0.0)
    for k in range(1, 101):
        assert not times.too_slow(np.full(4, k), 800, 200, 0.01 * k).any()


def test_enough_steps_or_another_reason() -> None:
    cut = EnoughSteps(100, lambda taken: taken == 50)
    assert [cut(taken) for taken in (49, 50, 51, 99, 100)] == [False, True, False, False, True]
