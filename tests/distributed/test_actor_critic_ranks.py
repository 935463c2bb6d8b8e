"""PPO and IMPALA on several ranks give the weights that they give on one: every space, memory and form of update."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers.actor_critic_kit import distance, make_chunk
from helpers.ranks_kit import STATS, N, make_batches, make_learner
from helpers.thread_ranks import ThreadRanks, learn_on_ranks, on_ranks, shard

from rayvec.data import Batch
from rayvec.data.chunk import join_chunks
from rayvec.errors import LearnerError
from rayvec.policies.policy import Policy

SLOW = pytest.mark.slow
ALGORITHMS = ("ppo", "impala")
LEARNERS = pytest.mark.parametrize("algorithm", ALGORITHMS)
MEMORIES = [{"recurrent": kind, "recurrent_size": 6, "sequence_length": 4} for kind in ("gru", "lstm")]
FEW, MORE = [[0, 3, N], [0, 0, N]], [[0, 6, N], [0, 2, 4, N], [0, 1, 4, 4, N]]
CASES: list[Any] = [
    *((algorithm, spaces, {}) for algorithm, spaces in product(ALGORITHMS, ("discrete", "box"))),
    *product(ALGORITHMS, ("discrete", "masked"), MEMORIES),
    ("ppo", "discrete", {**MEMORIES[0], "normalize_reward": True, "target_kl": 0.5}),
    *(pytest.param(*each, marks=SLOW) for each in product(ALGORITHMS, ["box"], MEMORIES)),
    *(("ppo", "discrete", each) for each in ({"target_kl": 1e-3}, {"normalize_advantage": False})),
    ("ppo", "discrete", {"clip_value_loss": True, "normalize_reward": True}),
    ("ppo", "discrete", {"compile": True, "minibatch_size": 28}),
]


def check(
    algorithm: str, spaces: str, settings: dict[str, Any], splits: Any, dtype: Any, num_updates: int, tolerance: float
) -> None:
    """Even, uneven and empty shards, and shards without a row of some minibatch; two chunks a batch."""
    make = partial(make_learner, algorithm, spaces, dtype, **settings)
    memory = {name: value for name, value in settings.items() if name in MEMORIES[0]}
    batches = make_batches(num_updates, spaces=spaces, **memory)
    (alone,), (expected_metrics,) = learn_on_ranks(make, batches, [0, N])
    expected = alone.state_dict()["parameters"]
    assert distance(make().state_dict()["parameters"], expected) > 0.01
    for bounds in splits:
        learners, metrics = learn_on_ranks(make, batches, bounds)
        parameters = [learner.state_dict()["parameters"] for learner in learners]
        assert distance(parameters[0], expected) <= tolerance, bounds
        assert all(torch.equal(each, parameters[0]) for each in parameters), bounds
        assert all(each == metrics[0] for each in metrics), bounds
        for ours, theirs in zip(metrics[0], expected_metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), bounds


@pytest.mark.parametrize("splits", [FEW, pytest.param(MORE, marks=SLOW)], ids=["few", "more"])
@pytest.mark.parametrize(("algorithm", "spaces", "settings"), CASES, ids=str)
def test_ranks_together_equal_one(algorithm: str, spaces: str, settings: dict[str, Any], splits: Any) -> None:
    """Compiled in two parts with the sum of gradients between them, in place of one; torch runs both as they are."""
    with torch.compiler.set_stance("force_eager") if "compile" in settings else nullcontext():
        check(algorithm, spaces, settings, splits, torch.float64, 4, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("spaces", ["discrete", "box"])
@LEARNERS
def test_ranks_together_equal_one_in_float32(algorithm: str, spaces: str) -> None:
    check(algorithm, spaces, {}, [*FEW, *MORE], torch.float32, 20, 1e-6)


@LEARNERS
@pytest.mark.parametrize(
    ("dtype", "num_updates", "tolerance"),
    [(torch.float64, 5, 1e-12), pytest.param(torch.float32, 50, 1e-5, marks=SLOW)],
)
def test_ranks_that_were_cut_equal_one_with_the_union_of_their_steps(
    algorithm: str, dtype: torch.dtype, num_updates: int, tolerance: float
) -> None:
    """Each rank has the chunk that it took, of a length of its own; one learner has all of them, joined."""
    lengths = np.random.default_rng(0).integers(1, 9, (num_updates, 3))
    policy, widths = Policy(make_learner().module), (2, 3, 2)
    taken = [
        [
            replace(make_chunk(policy, 3 * number + rank, num_steps=int(steps), num_envs=width), env_ids=ids)
            for rank, (steps, width, ids) in enumerate(zip(row, widths, np.split(np.arange(7), [2, 5]), strict=True))
        ]
        for number, row in enumerate(lengths)
    ]

    def learn_with(ranks: ThreadRanks) -> Any:
        learner = make_learner(algorithm, "discrete", dtype)
        learner.ranks = ranks
        for chunks in taken:
            learner.update(Batch((chunks[ranks.rank],), STATS))
        return learner.state_dict()["parameters"]

    one = make_learner(algorithm, "discrete", dtype)
    start = one.weights()
    for chunks in taken:
        one.update(Batch((join_chunks(chunks),), STATS))
    parameters = on_ranks(3, learn_with)
    assert distance(parameters[0], one.state_dict()["parameters"]) <= tolerance
    assert all(torch.equal(each, parameters[0]) for each in parameters)
    assert distance(parameters[0], start) > 0.01


@LEARNERS
def test_what_is_not_finite_stops_every_rank(algorithm: str) -> None:
    [batch] = make_batches(1)
    batch.chunks[0].rew[batch.chunks[0].valid.argmax(0)[5], 5] = float("nan")

    def work(ranks: ThreadRanks) -> str:
        learner = make_learner(algorithm)
        learner.ranks = ranks
        start, stop = ((0, 3), (3, N))[ranks.rank]
        with pytest.raises(LearnerError) as error:
            learner.update(shard(batch, start, stop))
        return str(error.value)

    first, second = on_ranks(2, work)
    assert "'policy_loss': nan" in first and first == second
