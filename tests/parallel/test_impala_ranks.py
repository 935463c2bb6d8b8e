"""IMPALA on several ranks gives the weights that it gives on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from test_ppo_ranks import BOX, DISCRETE, NUM_UPDATES, OBS, STATS, DoubleActorCritic, N, T, distance, make_batches
from thread_ranks import Apart, ThreadRanks, on_ranks
from torch import Tensor

from rayvec.config import IMPALAConfig
from rayvec.errors import LearnerError
from rayvec.learners.impala import IMPALALearner
from rayvec.nets import make_actor_critic
from rayvec.types import Batch


def make_learner(action_space: spaces.Space[Any], dtype: torch.dtype, **settings: Any) -> IMPALALearner:
    usual = {"num_envs": N, "num_steps": T, "num_minibatches": 3, "learning_rate": 1e-3, "seed": 5}
    config = IMPALAConfig(**{"total_steps": 4 * NUM_UPDATES * T * N, **usual, **settings})
    module = make_actor_critic(OBS, action_space, (16, 16), seed=1)
    if dtype == torch.float64:
        encoder = module.encoder
        module.double().__class__ = DoubleActorCritic
        module.encoder = lambda obs: encoder(obs).astype("float64")  # type: ignore[assignment]
    return IMPALALearner(OBS, action_space, config, module=module)


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
    """Even, uneven and empty shards; shards without a column of some minibatch."""
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


def test_without_sums_they_differ() -> None:
    """What the test above shows comes from the sums."""
    (expected,), _ = learn([0, N], DISCRETE, torch.float64)
    parameters, _ = learn([0, 3, N], DISCRETE, torch.float64, kind=Apart)
    assert distance(parameters[0], expected) > 1e-3


def test_what_is_not_finite_stops_every_rank() -> None:
    [batch] = make_batches(DISCRETE, 1)
    batch.chunks[0].rew[batch.chunks[0].valid.argmax(0)[5], 5] = float("nan")

    def work(ranks: ThreadRanks) -> str:
        learner = make_learner(DISCRETE, torch.float32)
        learner.ranks = ranks
        start, stop = ((0, 3), (3, N))[ranks.rank]
        with pytest.raises(LearnerError) as error:
            learner.update(Batch(tuple(chunk.columns(start, stop) for chunk in batch.chunks), STATS))
        return str(error.value)

    first, second = on_ranks(2, work)
    assert first == second and "'value_loss': nan" in first
