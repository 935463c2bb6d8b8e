"""Which samples a minibatch has."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayvec.learners.ranks import stratified_shuffle


@given(count=st.integers(0, 400), num_minibatches=st.integers(1, 300), seed=st.integers(0, 9))
def test_every_number_is_in_one_minibatch_and_every_stratum_in_all(count: int, num_minibatches: int, seed: int) -> None:
    shuffled = stratified_shuffle(count, num_minibatches, np.random.default_rng(seed))
    assert len(shuffled) == num_minibatches and all(np.array_equal(numbers, np.sort(numbers)) for numbers in shuffled)
    assert sorted(np.concatenate(shuffled).tolist()) == list(range(count))
    for numbers in shuffled:
        strata = (numbers // num_minibatches).tolist()
        full = count // num_minibatches
        assert strata[:full] == list(range(full)) and strata[full:] in ([], [full])


@given(
    bounds=st.tuples(st.integers(0, 400), st.integers(0, 400)), num_minibatches=st.integers(1, 50), seed=st.integers(0)
)
def test_a_range_of_numbers_has_as_much_of_each_minibatch(
    bounds: tuple[int, int], num_minibatches: int, seed: int
) -> None:
    first, last = sorted(bounds)
    shuffled = stratified_shuffle(400, num_minibatches, np.random.default_rng(seed))
    shares = [int(((numbers >= first) & (numbers < last)).sum()) for numbers in shuffled]
    assert max(shares) - min(shares) <= 2
    assert max(shares) <= (last - first) / num_minibatches + 2


def test_each_number_may_come_into_each_minibatch() -> None:
    generator = np.random.default_rng(0)
    counts = np.zeros((5, 3))
    for _ in range(3000):
        for minibatch, numbers in enumerate(stratified_shuffle(5, 3, generator)):
            counts[numbers, minibatch] += 1
    assert (abs(counts / 3000 - 1 / 3) < 0.04).all()  # four and a half standard deviations
