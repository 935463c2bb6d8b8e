"""PPO on several ranks gives the weights that it gives on one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gymnasium import spaces
from ppo_kit import BOX, DISCRETE, STATS, N, distance, make_batches, make_learner
from thread_ranks import Apart, ThreadRanks, on_ranks
from torch import Tensor

from rayvec.errors import ConfigError
from rayvec.types import Batch

NUM_UPDATES = 20


def learn(
    bounds: list[int],
    action_space: spaces.Space[Any],
    dtype: torch.dtype,
    num_updates: int = NUM_UPDATES,
    kind: type[ThreadRanks] = ThreadRanks,
    **settings: Any,
) -> tuple[list[Tensor], list[list[dict[str, float]]]]:
    """Learns on ranks that have the columns between `bounds`; returns each rank's parameters and metrics."""
    batches = make_batches(action_space, num_updates)

    def work(ranks: ThreadRanks) -> tuple[Tensor, list[dict[str, float]]]:
        learner = make_learner(action_space, dtype, **settings)
        learner.ranks = ranks
        start, stop = bounds[ranks.rank : ranks.rank + 2]
        shards = [Batch(tuple(chunk.columns(start, stop) for chunk in batch.chunks), STATS) for batch in batches]
        metrics = [learner.update(shard) for shard in shards]
        return learner.state_dict()["parameters"], metrics

    parameters, metrics = zip(*on_ranks(len(bounds) - 1, work, kind), strict=True)
    return list(parameters), list(metrics)


@pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_ranks_together_equal_one(action_space: spaces.Space[Any], dtype: torch.dtype, tolerance: float) -> None:
    """Even, uneven and empty shards."""
    (expected,), (expected_metrics,) = learn([0, N], action_space, dtype)
    start = make_learner(action_space, dtype).state_dict()["parameters"]
    assert distance(start, expected) > 0.01
    for bounds in ([0, 3, N], [0, 6, N], [0, 2, 4, N], [0, 0, N], [0, 1, 4, 4, N]):
        parameters, metrics = learn(bounds, action_space, dtype)
        assert distance(parameters[0], expected) <= tolerance, bounds
        assert all(torch.equal(each, parameters[0]) for each in parameters), bounds
        assert all(each == metrics[0] for each in metrics), bounds
        for ours, theirs in zip(metrics[0], expected_metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), bounds


@pytest.mark.parametrize("settings", [{"target_kl": 1e-3}, {"normalize_advantage": False}, {"clip_value_loss": True}])
def test_variants_equal_one(settings: dict[str, Any]) -> None:
    (expected,), _ = learn([0, N], DISCRETE, torch.float64, 5, **settings)
    parameters, _ = learn([0, 2, N], DISCRETE, torch.float64, 5, **settings)
    assert distance(parameters[0], expected) <= 1e-12
    assert torch.equal(*parameters)


def test_without_sums_they_differ() -> None:
    """What the tests above show comes from the sums."""
    (expected,), _ = learn([0, N], DISCRETE, torch.float64, 1)
    parameters, _ = learn([0, 3, N], DISCRETE, torch.float64, 1, kind=Apart)
    assert distance(parameters[0], expected) > 1e-3
    assert not torch.equal(*parameters)


def test_more_ranks_than_minibatch_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 2 ranks, as minibatch_size. Got: 3 ranks"):
        learn([0, *itertools.repeat(N, 3)], DISCRETE, torch.float32, 1, minibatch_size=2)
