"""LearnerGroup: the numbers of one learner, for all ranks, and every fault."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import sac_kit
from helpers.actor_critic_kit import distance
from helpers.rank_objects import CountsColumns
from helpers.ranks_kit import N, make_batches, make_learner

import rayvec
from rayvec.data import Batch
from rayvec.errors import ConfigError, LearnerError
from rayvec.learners.base import KeepsRankLocalState
from rayvec.policies.networks import flat_weights

MakeGroup = Callable[..., rayvec.LearnerGroup]


@pytest.fixture
def make_group(ray_cluster: object) -> Iterator[MakeGroup]:
    with ExitStack() as stack:

        def make_one(num_learners: int, make: Any = make_learner, **kwargs: Any) -> rayvec.LearnerGroup:
            return stack.enter_context(rayvec.LearnerGroup(make, num_learners, **kwargs))

        yield make_one


@pytest.fixture(scope="module")
def ppo_group(ray_cluster: object) -> Iterator[rayvec.LearnerGroup]:
    """Two ranks; every test begins with `new_learner`."""
    with rayvec.LearnerGroup(make_learner, 2) as group:
        yield group


def new_learner(group: rayvec.LearnerGroup) -> Any:
    """Returns a learner, and sets the group back to its state."""
    learner = make_learner()
    group.load_state_dict(learner.state_dict())
    return learner


def check_equal(group: rayvec.LearnerGroup, learner: Any, num_updates: int = 4, num_envs: int = N) -> None:
    np.testing.assert_array_equal(group.weights(), learner.weights())
    for batch in make_batches(num_updates, num_envs):
        expected = learner.update(batch)
        assert group.update(batch) == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert distance(group.weights(), learner.weights()) < 1e-6


def test_two_ranks_of_ppo_equal_a_learner(ppo_group: rayvec.LearnerGroup) -> None:
    check_equal(ppo_group, new_learner(ppo_group))


@pytest.mark.slow
def test_two_ranks_of_impala_equal_a_learner(make_group: MakeGroup) -> None:
    check_equal(make_group(2, partial(make_learner, "impala")), make_learner("impala"))


@pytest.mark.parametrize("where", [{"num_nodes": 0}, pytest.param({"num_cpus": 0}, marks=pytest.mark.slow)], ids=str)
def test_after_a_lost_rank_the_weights_stay_and_the_next_update_has_new_ranks(
    make_group: MakeGroup, where: dict[str, Any]
) -> None:
    first, lost, second = make_batches(3)
    group, learner = make_group(2, **where), make_learner()
    learner.update(first)
    group.update(first)
    group.state_dict()  # else new ranks might continue from the state before `first`
    weights, pids = group.weights(), group.group.pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(LearnerError, match=r"rank 1 on .* is lost"):
        group.update(lost)
    np.testing.assert_array_equal(group.weights(), weights)
    assert group.update(second) == pytest.approx(learner.update(second), rel=1e-3, abs=1e-5)
    assert distance(group.weights(), learner.weights()) < 1e-6
    assert not set(group.group.pids) & set(pids)


def test_one_rank_gets_chunks_of_different_environments_whole() -> None:
    """If it is lost when it has measured a batch, the weights stay those of the last update."""
    (batch,) = make_batches(1)
    chunks = [batch.chunks[0].columns(start, N) for start in (1, 0)]
    with rayvec.LearnerGroup(CountsColumns, num_nodes=0) as group:
        assert group.update(Batch(tuple(chunks), batch.stats)) == {"0": N - 1, "1": N}
        with pytest.raises(LearnerError, match="is lost"):
            group.measure(batch)
        assert group.weights().tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_learners", "num_envs"), [(1, N), (3, 2)], ids=["one rank", "a rank without environments"]
)
def test_a_group_equals_a_learner(make_group: MakeGroup, num_learners: int, num_envs: int) -> None:
    check_equal(make_group(num_learners), make_learner(), 10, num_envs)


def test_what_a_group_refuses(make_group: MakeGroup, ppo_group: rayvec.LearnerGroup) -> None:
    with pytest.raises(ConfigError, match="CountsColumns"):  # which knows nothing of ranks
        make_group(2, CountsColumns, num_nodes=0)
    with pytest.raises(ConfigError, match=r"num_learners is .* whole number"):
        make_group(0)
    (batch,) = make_batches(1)
    stats = dataclasses.replace(batch.stats, staleness_counts=(N,))
    with pytest.raises(LearnerError, match="with max_staleness"):
        ppo_group.update(dataclasses.replace(batch, stats=stats))


@pytest.mark.slow
def test_a_group_of_sac_equals_a_learner_and_resumes_exactly(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """From a checkpoint with the replay of both ranks; with a replay that is not theirs, they say that it refills."""
    learner, group = sac_kit.make_learner(), make_group(2, sac_kit.make_learner)
    for seed in range(3):
        expected = learner.update(sac_kit.make_batch(seed=seed))
        assert group.update(sac_kit.make_batch(seed=seed)) == pytest.approx(expected, rel=1e-6)
        assert distance(group.weights(), learner.weights()) < 1e-6
    assert not np.array_equal(group.weights(), sac_kit.make_learner().weights())
    assert isinstance(learner, KeepsRankLocalState)
    np.testing.assert_array_equal(flat_weights(group.module), group.weights())

    file = io.BytesIO()
    torch.save(group.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    following = [group.update(sac_kit.make_batch(seed=seed)) for seed in (3, 4)]
    weights = group.weights()
    with caplog.at_level(logging.WARNING):
        group.load_state_dict(state)
        assert [group.update(sac_kit.make_batch(seed=seed)) for seed in (3, 4)] == following
        np.testing.assert_array_equal(group.weights(), weights)
        assert not caplog.text

        group.load_state_dict(learner.state_dict())
        assert "the replay of 1 rank does not fit 2" in caplog.text
        assert group.update(sac_kit.make_batch(seed=3)) == {}
        assert group.update(sac_kit.make_batch(seed=4))["replay_steps"] == 32

        caplog.clear()
        learner.load_state_dict(state)
        assert "the replay refills" in caplog.text
        assert learner.update(sac_kit.make_batch(seed=3)) == {}
        assert learner.update(sac_kit.make_batch(seed=4))["num_updates"] == 48
