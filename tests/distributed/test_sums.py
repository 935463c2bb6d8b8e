"""Sums over processes, without Ray: their bits, and what becomes of them when a process ends, stops or leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.rank_processes import (
    fall_before_second_sum,
    on_processes,
    sum_at_random,
    sum_each,
    sum_of_length,
    tensor_of,
)
from helpers.waiting import shm_names, wait_until
from torch import Tensor

from rayvec.distributed.allreduce_shared_memory import SharedMemoryRanks
from rayvec.errors import LearnerError, RankLostError
from rayvec.learners.ranks import ALONE, global_moments, global_range

KINDS = pytest.mark.parametrize("kind", ["shared memory", "collective"])
CASES = [
    (dtype, shape)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16)
    for shape in ((), (0,), (1,), (3, 5), (16384,), (16385,), (70_001,))
] + [(torch.float32, (5_000_003,))]  # the last does not fit a slot of shared memory


def in_rank_order(size: int, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    total = tensor_of(0, number, dtype, shape)
    for rank in range(1, size):
        total += tensor_of(rank, number, dtype, shape)
    return total


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shared_memory_sums_in_rank_order(size: int) -> None:
    for sums in on_processes(size, sum_each, CASES, kind="shared memory"):
        for number, (case, total) in enumerate(zip(CASES, sums, strict=True)):
            assert torch.equal(total, in_rank_order(size, number, *case)), case


def test_a_collective_gives_all_ranks_the_same_bits() -> None:
    first, *others = on_processes(3, sum_each, CASES, kind="collective")
    for number, (case, total) in enumerate(zip(CASES, first, strict=True)):
        tolerance = {"atol": 0.05, "rtol": 0.0} if case[0] == torch.bfloat16 else {}
        torch.testing.assert_close(total, in_rank_order(3, number, *case), **tolerance)
        assert all(torch.equal(other[number], total) for other in others), case


def test_nothing_is_overwritten_that_is_still_read() -> None:
    """Many sums of all sizes, with pauses on this rank or that, all of them right."""
    assert on_processes(3, sum_at_random, 600, 1, kind="shared memory") == [0, 0, 0]


@KINDS
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_was_killed_is_missed(kind: str, who: int) -> None:
    results = on_processes(3, fall_before_second_sum, who, "SIGKILL", kind=kind)
    assert results.pop(who) is None
    for result in results:
        assert isinstance(result, RankLostError)
        if kind == "shared memory":
            assert "has left, or its process has ended" in str(result)


@KINDS
def test_a_rank_that_leaves_tells_the_others(kind: str) -> None:
    first, second = on_processes(2, fall_before_second_sum, 1, "close", kind=kind)
    assert isinstance(first, RankLostError) and torch.equal(second[0], torch.full((3,), 2.0))
    assert kind == "collective" or "Rank 1 has left" in str(first)


def test_nothing_has_a_name() -> None:
    before = shm_names()
    ranks = SharedMemoryRanks(0, 2)
    wait_until(lambda: shm_names() <= before, "it has no name")
    assert Path(ranks.path).exists()
    ranks.close()
    ranks.close()
    assert not Path(ranks.path).exists()
    with pytest.raises(RankLostError, match="Rank 0 has ended"):
        SharedMemoryRanks(1, 2, ranks.path)


def test_one_rank_alone_counts_and_sums() -> None:
    assert global_range(ALONE, 5) == (range(5), 5)
    padded = torch.tensor([[1.0, 2.0, 6.0], [7.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
    mean, variance = global_moments(ALONE, padded, [3, 2, 0])
    assert mean.tolist() == [3.0, 8.0, 0.0]
    torch.testing.assert_close(variance, torch.tensor([14 / 3, 1.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("lengths", [(3, 4), (3, 70_001), (70_001, 80_001)], ids=str)
def test_tensors_of_other_lengths_are_an_error_on_every_rank(lengths: tuple[int, int]) -> None:
    for result in on_processes(2, sum_of_length, lengths, kind="shared memory"):
        assert isinstance(result, LearnerError) and "of the same shape and dtype" in str(result)
