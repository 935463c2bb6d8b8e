"""Which rows a minibatch has."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayvec.learners.ranks import deal


@given(count=st.integers(0, 400), num_minibatches=st.integers(1, 300), seed=st.integers(0, 9))
def test_every_number_is_dealt_once_and_every_round_to_all(count: int, num_minibatches: int, seed: int) -> None:
    dealt = deal(count, num_minibatches, np.random.default_rng(seed))
    assert len(dealt) == num_minibatches and all(np.array_equal(numbers, np.sort(numbers)) for numbers in dealt)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(count))
    for numbers in dealt:
        rounds = (numbers // num_minibatches).tolist()
        full = count // num_minibatches
        assert rounds[:full] == list(range(full)) and rounds[full:] in ([], [full])


@given(
    bounds=st.tuples(st.integers(0, 400), st.integers(0, 400)), num_minibatches=st.integers(1, 50), seed=st.integers(0)
)
def test_who_holds_a_range_holds_as_much_of_each_minibatch(
    bounds: tuple[int, int], num_minibatches: int, seed: int
) -> None:
    first, last = sorted(bounds)
    dealt = deal(400, num_minibatches, np.random.default_rng(seed))
    shares = [int(((numbers >= first) & (numbers < last)).sum()) for numbers in dealt]
    assert max(shares) - min(shares) <= 2
    assert max(shares) <= (last - first) / num_minibatches + 2


def test_each_number_may_come_into_each_minibatch() -> None:
    generator = np.random.default_rng(0)
    counts = np.zeros((5, 3))
    for _ in range(3000):
        for minibatch, numbers in enumerate(deal(5, 3, generator)):
            counts[numbers, minibatch] += 1
    assert (abs(counts / 3000 - 1 / 3) < 0.04).all()  # four and a half standard deviations
