"""SAC on ranks that are processes: the numbers of one learner, and what becomes of the replay that each rank keeps."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.actor_critic_kit import distance
from helpers.sac_kit import make_batch, make_learner

import rayvec
from rayvec.learners.base import KeepsRankLocalState
from rayvec.policies.networks import flat_weights

MakeGroup = Callable[..., rayvec.LearnerGroup]


@pytest.fixture
def make_group(ray_cluster: object) -> Iterator[MakeGroup]:
    made: list[rayvec.LearnerGroup] = []

    def make(num_learners: int, make: Any = lambda: make_learner(), **kwargs: Any) -> rayvec.LearnerGroup:
        made.append(rayvec.LearnerGroup(make, num_learners, **kwargs))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.mark.slow
def test_a_group_equals_a_learner_and_resumes_exactly(make_group: MakeGroup, caplog: pytest.LogCaptureFixture) -> None:
    """From a checkpoint with the replay of both ranks; with a replay that is not theirs, they say that it refills."""
    learner, group = make_learner(), make_group(2)
    for seed in range(3):
        expected = learner.update(make_batch(seed=seed))
        assert group.update(make_batch(seed=seed)) == pytest.approx(expected, rel=1e-6)
        assert distance(group.weights(), learner.weights()) < 1e-6
    assert not np.array_equal(group.weights(), make_learner().weights())
    assert isinstance(learner, KeepsRankLocalState)
    np.testing.assert_array_equal(flat_weights(group.module), group.weights())

    file = io.BytesIO()
    torch.save(group.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    following = [group.update(make_batch(seed=seed)) for seed in (3, 4)]
    weights = group.weights()
    with caplog.at_level(logging.WARNING):
        group.load_state_dict(state)
        assert [group.update(make_batch(seed=seed)) for seed in (3, 4)] == following
        np.testing.assert_array_equal(group.weights(), weights)
        assert not caplog.text

        group.load_state_dict(learner.state_dict())
        assert "the replay of 1 rank does not fit 2" in caplog.text
        assert group.update(make_batch(seed=3)) == {}
        assert group.update(make_batch(seed=4))["replay_steps"] == 32

        caplog.clear()
        learner.load_state_dict(state)
        assert "the replay refills" in caplog.text
        assert learner.update(make_batch(seed=3)) == {}
        assert learner.update(make_batch(seed=4))["num_updates"] == 48
