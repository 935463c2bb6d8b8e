"""PPO and IMPALA on several ranks give the weights that they give on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.actor_critic_kit import BOX, DISCRETE, MASKED, OBS, distance, impala_config, make_chunk, ppo_config
from helpers.ranks_kit import STATS, N, make_batches, make_impala, make_learner
from helpers.thread_ranks import ThreadRanks, learn_on_ranks, on_ranks, shard
from torch import Tensor

from rayvec.data import Batch
from rayvec.data.join_chunks import join_chunks
from rayvec.errors import LearnerError
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.policies.networks import ActorCritic
from rayvec.policies.policy import Policy
from rayvec.policies.recurrent import RecurrentActorCritic

Metrics = list[dict[str, float]]
TWO_RANKS = [[0, 3, N], [0, 6, N], [0, 0, N]]
ALL_SPLITS = [*TWO_RANKS, [0, 2, 4, N], [0, 1, 4, 4, N]]
LEARNERS = pytest.mark.parametrize("make", [make_learner, make_impala], ids=["ppo", "impala"])


def learn(
    make: Callable[[], Any], action_space: spaces.Space[Any], bounds: list[int], num_updates: int = 20, **kwargs: Any
) -> tuple[list[Tensor], list[Metrics]]:
    """Returns the parameters and metrics of each of the ranks that have the columns between `bounds`."""
    learners, metrics = learn_on_ranks(make, make_batches(action_space, num_updates), bounds, **kwargs)
    return [learner.state_dict()["parameters"] for learner in learners], metrics


@LEARNERS
@pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize(
    ("splits", "num_updates", "dtype", "tolerance"),
    [
        (TWO_RANKS, 5, torch.float64, 1e-12),
        pytest.param(ALL_SPLITS, 20, torch.float64, 1e-12, marks=pytest.mark.slow),
        pytest.param(ALL_SPLITS, 20, torch.float32, 1e-6, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "up to four ranks", "up to four ranks in float32"],
)
def test_ranks_together_equal_one(
    make: Any,
    action_space: spaces.Space[Any],
    splits: list[list[int]],
    num_updates: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Even, uneven and empty shards; shards without a row of some minibatch."""

    def make_one() -> Any:
        return make(action_space, dtype)

    (expected,), (expected_metrics,) = learn(make_one, action_space, [0, N], num_updates)
    assert distance(make_one().state_dict()["parameters"], expected) > 0.01
    for bounds in splits:
        parameters, metrics = learn(make_one, action_space, bounds, num_updates)
        assert distance(parameters[0], expected) <= tolerance, bounds
        assert all(torch.equal(each, parameters[0]) for each in parameters), bounds
        assert all(each == metrics[0] for each in metrics), bounds
        for ours, theirs in zip(metrics[0], expected_metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), bounds


@LEARNERS
@pytest.mark.parametrize(
    ("dtype", "num_updates", "tolerance"),
    [(torch.float64, 5, 1e-12), pytest.param(torch.float32, 50, 1e-5, marks=pytest.mark.slow)],
)
def test_ranks_that_were_cut_equal_one_with_the_union_of_their_steps(
    make: Any, dtype: torch.dtype, num_updates: int, tolerance: float
) -> None:
    """Each rank has the chunk that it took, of a length of its own; one learner has all of them, joined."""
    lengths = np.random.default_rng(0).integers(1, 9, (num_updates, 3))
    policy, widths = Policy(ActorCritic(OBS, DISCRETE, (16, 16), seed=1)), (2, 3, 2)
    taken = [
        [
            replace(make_chunk(policy, 3 * number + rank, num_steps=int(steps), num_envs=width), env_ids=ids)
            for rank, (steps, width, ids) in enumerate(zip(row, widths, np.split(np.arange(7), [2, 5]), strict=True))
        ]
        for number, row in enumerate(lengths)
    ]

    def learn_with(ranks: ThreadRanks) -> Any:
        learner = make(DISCRETE, dtype)
        learner.ranks = ranks
        for chunks in taken:
            learner.update(Batch((chunks[ranks.rank],), STATS))
        return learner.state_dict()["parameters"]

    one = make(DISCRETE, dtype)
    for chunks in taken:
        one.update(Batch((join_chunks(chunks),), STATS))
    parameters = on_ranks(3, learn_with)
    assert distance(parameters[0], one.state_dict()["parameters"]) <= tolerance
    assert all(torch.equal(each, parameters[0]) for each in parameters)
    assert distance(parameters[0], make(DISCRETE, dtype).state_dict()["parameters"]) > 0.01


@pytest.mark.parametrize("settings", [{"target_kl": 1e-3}, {"normalize_advantage": False}, {"clip_value_loss": True}])
def test_variants_of_ppo_equal_one(settings: dict[str, Any]) -> None:
    def make_one() -> Any:
        return make_learner(DISCRETE, torch.float64, **settings)

    (expected,), _ = learn(make_one, DISCRETE, [0, N], 5)
    parameters, _ = learn(make_one, DISCRETE, [0, 2, N], 5)
    assert distance(parameters[0], expected) <= 1e-12
    assert torch.equal(*parameters)


@pytest.mark.parametrize("bounds", [[0, 3, N], [0, 0, N]], ids=["even", "uneven"])
def test_compiled_ranks_equal_one(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In two parts with the sum of gradients between them, in place of one."""
    monkeypatch.setattr("torch.compile", lambda function, **_: function)

    def make_one() -> Any:
        return make_learner(DISCRETE, torch.float64, compile=True, minibatch_size=28)

    (alone,), _ = learn(make_one, DISCRETE, [0, N], 5)
    parameters, _ = learn(make_one, DISCRETE, bounds, 5)
    assert distance(parameters[0], alone) <= 1e-12
    assert torch.equal(*parameters)


@LEARNERS
def test_what_is_not_finite_stops_every_rank(make: Any) -> None:
    [batch] = make_batches(DISCRETE, 1)
    batch.chunks[0].rew[batch.chunks[0].valid.argmax(0)[5], 5] = float("nan")

    def work(ranks: ThreadRanks) -> str:
        learner = make(DISCRETE)
        learner.ranks = ranks
        start, stop = ((0, 3), (3, N))[ranks.rank]
        with pytest.raises(LearnerError) as error:
            learner.update(shard(batch, start, stop))
        return str(error.value)

    first, second = on_ranks(2, work)
    assert "'policy_loss': nan" in first and first == second


T = 11
SPLITS = [
    [0, 3, N],
    pytest.param([0, 0, N], marks=pytest.mark.slow),
    pytest.param([0, 1, 4, 4, N], marks=pytest.mark.slow),
]
CELLS = pytest.mark.parametrize("kind", ["gru", "lstm"])
ALGORITHMS = pytest.mark.parametrize("algorithm", ["ppo", "impala"])


class DoubleRecurrent(RecurrentActorCritic):
    """A recurrent actor-critic that computes in float64."""

    def encode(self, obs: Any) -> Any:
        rows = torch.from_numpy(self.encoder(obs)).double()
        return (rows, torch.from_numpy(obs["action_mask"] != 0)) if self.is_masked else rows


def make_module(both: tuple[spaces.Space[Any], spaces.Space[Any]], kind: Any) -> RecurrentActorCritic:
    settings = {"recurrent_size": 6, "sequence_length": 4, "seed": 1}
    return RecurrentActorCritic(*both, (8,), kind=kind, masked=both[0] is MASKED, **settings)


def make_recurrent(algorithm: str, both: Any, kind: Any, compiled: bool = False) -> PPOLearner | IMPALALearner:
    module = make_module(both, kind).double()
    module.__class__ = DoubleRecurrent
    common = {"recurrent": kind, "sequence_length": 4, "num_envs": N, "num_steps": T, "compile": compiled}
    if algorithm == "ppo":
        config = ppo_config(**common, minibatch_size=20, target_kl=0.5, normalize_reward=True)
        return PPOLearner(*both, config, module=module)
    return IMPALALearner(*both, impala_config(**common, num_minibatches=3), module=module)


def recurrent_batches(both: Any, kind: Any, count: int) -> list[Batch]:
    policy, common = Policy(make_module(both, kind)), {"num_steps": T, "num_envs": N, "invalid": True, "space": both[0]}
    chunks = [make_chunk(policy, seed, **common) for seed in range(2 * count)]
    return [Batch(tuple(chunks[first : first + 2]), STATS) for first in range(0, 2 * count, 2)]


def learn_recurrent(
    algorithm: str, both: Any, cell: str, bounds: list[int], *, compiled: bool = False, **kwargs: Any
) -> tuple[list[Tensor], list[list[dict[str, float]]]]:
    make = partial(make_recurrent, algorithm, both, cell, compiled)
    learners, metrics = learn_on_ranks(make, recurrent_batches(both, cell, 4), bounds, **kwargs)
    return [learner.state_dict()["parameters"] for learner in learners], metrics


@ALGORITHMS
@CELLS
@pytest.mark.parametrize(
    "both",
    [(OBS, DISCRETE), (MASKED, DISCRETE), pytest.param((OBS, BOX), marks=pytest.mark.slow)],
    ids=["discrete", "masked", "box"],
)
@pytest.mark.parametrize("bounds", SPLITS, ids=str)
def test_recurrent_ranks_together_equal_one(algorithm: str, kind: str, both: Any, bounds: list[int]) -> None:
    """Even, uneven and empty shards, two chunks a batch, whose last sequences are shorter."""
    (expected,), (expected_metrics,) = learn_recurrent(algorithm, both, kind, [0, N])
    parameters, metrics = learn_recurrent(algorithm, both, kind, bounds)
    assert distance(parameters[0], expected) <= 1e-12
    assert all(torch.equal(each, parameters[0]) for each in parameters)
    for ours, theirs in zip(metrics[0], expected_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    start = make_recurrent(algorithm, both, kind).state_dict()["parameters"]
    assert distance(start, expected) > 0.01
