"""Where the time goes: states are exclusive, and sum to the whole."""

from __future__ import annotations

import numpy as np
import pytest

from rayvec.bench.harness.time_split import STATES, split, split_ahead


def test_chunks_by_hand() -> None:
    # Two calls asked at 0 and 10; two workers with two steps each in the first call.
    calls = np.array([[0.0, 9.0], [10.0, 19.0]])
    clocks = [np.array([[1.0, 3.0], [4.0, 6.0]]), np.array([[1.5, 4.0], [4.5, 7.5]])]
    inference = np.array([[0.5, 0.25], [0.0, 0.0]])
    shares = split(calls, clocks, inference, packing_s=0.5, driver_s=0.25)
    expected = {
        "environment": 4.0 + 5.5,
        "inference": 0.5 + 0.25,
        "serialisation": (1.0 - 0.5 + 0.5) + (0.5 - 0.25 + 0.5),
        "transport": (1.0 + 1.5 - 0.75) + (1.5 + 1.5 - 0.75),
        "waiting": 1.5 + 0.0,
        "driver": 1.25 + 1.25,
        "unattributed": 0.0,
    }
    assert shares == pytest.approx({state: seconds / 20 for state, seconds in expected.items()})


def test_what_no_clock_saw_is_unattributed() -> None:
    calls = np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]])
    clocks = [np.array([[0.0, 1.0]]), np.array([[0.0, 1.0], [1.0, 2.0]])]
    shares = split(calls, clocks)
    assert shares["unattributed"] == pytest.approx(0.25) and shares["environment"] == pytest.approx(0.75)


def test_packing_never_exceeds_the_way() -> None:
    shares = split(np.array([[0.0, 1.0], [1.0, 1.0]]), [np.array([[0.1, 0.9]])], packing_s=5.0, driver_s=5.0)
    assert shares["serialisation"] == pytest.approx(0.2) and shares["transport"] == shares["driver"] == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_shares_sum_to_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = np.cumsum(rng.random(41))
    calls = edges[:40].reshape(-1, 2)
    clocks = []
    for _ in range(3):
        inside = np.sort(rng.uniform(calls[:, :1], calls[:, 1:], (len(calls), 4)), axis=1)
        clocks.append(inside.reshape(-1, 2))
    shares = split(calls, clocks, packing_s=0.01, driver_s=0.02)
    assert tuple(shares) == STATES and min(shares.values()) >= 0
    assert sum(shares.values()) == pytest.approx(1.0) and shares["unattributed"] < 1e-9


def test_chunks_ahead_by_hand() -> None:
    # Two workers, chunks of two steps at 0 and at 10 (11 for the second); a third chunk only ends the second.
    clocks = [
        np.array([[0.0, 3.0], [4.0, 6.0], [10.0, 13.0], [14.0, 16.0], [20.0, 21.0], [22.0, 23.0]]),
        np.array([[0.0, 4.0], [4.5, 8.0], [11.0, 14.0], [14.5, 17.0], [21.0, 22.0], [23.0, 24.0]]),
    ]
    shares = split_ahead(clocks, [2, 2], np.array([[9.0, 9.0], [0.5, 0.25], [1.5, 0.25]]), packing_s=0.5)
    expected = {
        "environment": 5.0 + 5.0 + 7.5 + 5.5,
        "inference": 0.5 + 1.5 + 0.25 + 0.25,
        "serialisation": (0.5 + 0.5) + 0.5 + (0.25 + 0.5) + (0.25 + 0.5),
        "transport": (4.0 - 0.5 - 2.0) + (4.0 - 0.5 - 0.5 - 1.0) + (3.0 - 0.5) + (4.0 - 0.5),
        "waiting": 2.0 + 1.0,
        "driver": 0.0,
        "unattributed": 0.0,
    }
    assert shares == pytest.approx({state: seconds / 41 for state, seconds in expected.items()})


def test_one_chunk_ahead_says_nothing() -> None:
    assert split_ahead([np.zeros((3, 2))], [2], np.zeros((1, 1)))["unattributed"] == 1.0
