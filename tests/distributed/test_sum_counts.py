"""How often the ranks of an update wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.device_cases import Case
from torch import Tensor

from rayvec.learners.ranks import Alone


class Counting(Alone):
    """A rank alone that counts its sums."""

    num_sums = 0

    def sum_(self, tensor: Tensor) -> Tensor:
        self.num_sums += 1
        return tensor


@pytest.mark.parametrize(
    ("case", "minibatches", "others"),
    [
        # rows of each rank; for each epoch the moments of advantages, and metrics; the explained variance
        (Case("ppo", "numbers", "box", {"num_epochs": 3}), 3 * 2, 1 + 3 * 2 + 1),
        # besides, environments of each rank, and returns with their moments; moments of observations
        (Case("ppo", "numbers", "box", {"normalize_reward": True, "normalize_obs": True}), 2 * 2, 1 + 2 * 2 + 1 + 3),
        # environments of each rank, steps of each minibatch, metrics; rewards that are bad, and returns, with the
        # environments of each rank
        (Case("impala", "numbers", "box", {"num_minibatches": 4, "normalize_reward": True}), 4, 3 + 3),
        # rewards that are bad, steps, rows of each rank, fills of each environment, metrics
        (Case("sac", "numbers", "box", {"policy_interval": 100}), 3, 5),
    ],
    ids=str,
)
def test_the_number_of_sums(case: Case, minibatches: int, others: int) -> None:
    """One for the gradient of each minibatch, and few others; each costs the ranks a wait."""
    learner: Any = case.learner("cpu")
    batches = case.batches(2)
    learner.update(batches[0])
    learner.ranks = ranks = Counting()
    learner.update(batches[1])
    assert ranks.num_sums <= minibatches + others
