"""Straggler mitigation: who has arrived, when a rank stops, and that every rank takes part in every sum."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.thread_ranks import ThreadRanks, on_ranks
from helpers.training_kit import assert_same
from helpers.waiting import DEADLINE_S, wait_until
from hypothesis import given, strategies as st

from rayvec.config import IMPALAConfig, PPOConfig, SACConfig, TrainConfig
from rayvec.distributed.rank import pack
from rayvec.distributed.rank_state import shared_state
from rayvec.distributed.rendezvous import RayArrivals, delete_rendezvous
from rayvec.distributed.stragglers import SharedArrivals, Stragglers
from rayvec.training.rank_trainer import RankTrainer
from rayvec.training.runs import LEARNERS
from rayvec.training.trainer import Progress

COMMON: dict[str, Any] = {"num_envs": 6, "num_nodes": 0, "workers_per_node": 0, "learners": "decentralized"}
CONFIGS: list[TrainConfig] = [
    PPOConfig(**COMMON, num_steps=8, minibatch_size=16, num_epochs=2, target_kl=0.02, normalize_obs=True),
    IMPALAConfig(**COMMON, num_steps=8, num_minibatches=2),
    SACConfig(**COMMON, num_steps=8, batch_size=16, learning_starts=40, hidden_sizes=(16, 16), env_id="Pendulum-v1"),
]


@examples(100)
@given(st.integers(1, 8), st.floats(0.05, 1), st.data())
def test_a_rank_stops_once_enough_have_arrived_and_it_has_its_share(size: int, fraction: float, data: Any) -> None:
    there, taken = data.draw(st.integers(0, size)), data.draw(st.integers(0, 100))

    class Known:
        def arrive(self, iteration: int) -> None: ...

        def have_arrived(self, iteration: int, count: int) -> bool:
            return there >= count

    rule = Stragglers(Known(), size, sync_fraction=fraction)
    most, cut = rule.begin(100)
    assert most == 100
    enough = next(count for count in range(1, size + 1) if count / size >= fraction - 1e-9)
    stops = there >= enough and enough < size and taken >= 25
    assert (cut is not None and cut(taken)) == stops == rule.has_cut


def check_arrivals(first: Any, second: Any) -> None:
    for iteration in (1, 2, 3, 4):
        assert not second.have_arrived(iteration, 1)
        first.arrive(iteration)
        wait_until(lambda: second.have_arrived(iteration, 1))  # noqa: B023
        assert not second.have_arrived(iteration, 2)
        second.arrive(iteration)
        wait_until(lambda: first.have_arrived(iteration, 2))  # noqa: B023


def test_arrivals_are_counted_by_iteration(ray_cluster: object) -> None:
    with SharedArrivals.open(2) as path:
        check_arrivals(SharedArrivals(path, 0), SharedArrivals(path, 1))
    check_arrivals(RayArrivals("test", 0), RayArrivals("test", 1))
    delete_rendezvous("test")
    assert not RayArrivals("test", 0).have_arrived(4, 1)


class Counted(ThreadRanks):
    """A rank that counts its sums."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_sums = 0

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return super().all_reduce_(tensor)


@pytest.mark.parametrize(
    "config", [*CONFIGS[:2], pytest.param(CONFIGS[2], marks=pytest.mark.slow)], ids=lambda config: config.algorithm
)
def test_ranks_that_are_cut_at_random_stay_equal(config: TrainConfig) -> None:
    """Every rank takes part in equally many sums, also one that arrives exactly at the threshold."""
    num_ranks, num_updates, together = 3, 25, threading.Barrier(3)

    class Jittery(SharedArrivals):
        """Some ranks are late by chance, and some arrive at the same time."""

        def __init__(self, path: str, rank: int) -> None:
            super().__init__(path, rank)
            self.is_there, self.random = 0, random.Random(rank)

        def arrive(self, iteration: int) -> None:
            if iteration % 3 == 0:
                together.wait(DEADLINE_S)
            super().arrive(iteration)
            self.is_there = iteration

        def have_arrived(self, iteration: int, count: int) -> bool:
            time.sleep(self.random.choice([0, 0, 0.0005]))
            have_arrived = super().have_arrived(iteration, count)
            return (self.is_there < iteration and self.random.random() < 0.1) or have_arrived

    def work(ranks: Any) -> tuple[dict[str, Any], int, list[int]]:
        trainer = RankTrainer(config, LEARNERS[type(config)], (), partial(Jittery, path), False, 0, ranks)
        try:
            trainer.begin(Progress(), [pack(shared_state(trainer.learner))], None)
            steps = [trainer.iterate().stats.n_collected_steps for _ in range(num_updates)]
            return shared_state(trainer.learner), ranks.num_sums, steps
        finally:
            trainer.close()

    with SharedArrivals.open(num_ranks) as path:
        states, sums, steps = zip(*on_ranks(num_ranks, work, Counted), strict=True)
    assert len(set(sums)) == 1
    assert {count for of_rank in steps for count in of_rank} > {16}, "some iterations were cut, and some were not"
    for state in states[1:]:
        assert_same(state, states[0])
