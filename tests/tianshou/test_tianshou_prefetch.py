"""Tianshou's collector with chunks ahead: the buffer of one without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tianshou.data
import torch
from helpers import tianshou_algorithms as kit
from helpers.exact import DriftEnv
from helpers.tianshou_buffers import assert_same_buffer
from helpers.tianshou_kit import Exact, Remembers
from tianshou.algorithm import DQN, PPO
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams

from rayvec.errors import ConfigError
from rayvec.tianshou import Collector, RayVectorEnv

SEEDS = [11, 22, 33, 44, 55]


@pytest.fixture(scope="module")
def venv() -> Iterator[RayVectorEnv]:
    made = RayVectorEnv([DriftEnv] * 5, num_nodes=0, workers_per_node=2, preload=("helpers.tianshou_kit",))
    yield made
    with suppress(Exception):
        made.close()


def pair(venv: RayVectorEnv, make_policy: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns our prefetching collector and Tianshou's own, reset with the same seeds."""
    theirs = DummyVectorEnv([DriftEnv] * 5)
    mine = Collector(make_policy(), venv, VectorReplayBuffer(2000, 5), prefetch=True)
    other = tianshou.data.Collector(make_policy(), theirs, VectorReplayBuffer(2000, 5))
    for envs, collector in ((venv, mine), (theirs, other)):
        envs.seed(SEEDS)
        collector.reset()
    return mine, other


@pytest.mark.parametrize("make_policy", [Exact, Remembers])
def test_steps_are_those_of_the_policy_one_change_ago(venv: RayVectorEnv, make_policy: Callable[[], Any]) -> None:
    mine, other = pair(venv, make_policy)
    learns = make_policy is Exact
    ages = []
    for change in range(4):
        stats = mine.collect(n_step=50)
        ages.append(stats.staleness)
        expected = other.collect(n_step=50)
        np.testing.assert_array_equal(stats.returns, expected.returns)
        np.testing.assert_array_equal(stats.lens, expected.lens)
        assert_same_buffer(mine.buffer, other.buffer)
        if learns:
            if change > 0:
                other.policy.shift.data.fill_(3.0 + change)  # as it was when the pending chunk started
            mine.policy.shift.data.fill_(4.0 + change)
    assert ages == ([0, 1, 1, 1] if learns else [0, 0, 0, 0])
    assert mine.collect_step == other.collect_step == 200
    mine.reset_env()  # frees the environments for the next test


def test_what_cannot_be_collected_ahead_is_refused(venv: RayVectorEnv) -> None:
    ppo = PPO(**kit.actor_critic(2, 2), optim=kit.adam())
    for policy, env, settings, words in (
        (ppo, venv, {}, "its present policy"),
        (ppo.policy, venv, {}, "its present policy"),
        (Exact(), venv, {"inference": "driver"}, "inference='worker'"),
        (Exact(), DummyVectorEnv([DriftEnv] * 2), {}, "RayVectorEnv"),
    ):
        with pytest.raises(ConfigError, match=words):
            Collector(policy, env, prefetch=True, **settings)  # type: ignore[arg-type]
    collector = Collector(Exact(), venv, prefetch=True)
    collector.reset()
    collector.set_on_step_hook(lambda acts, batch: None)
    with pytest.raises(ConfigError, match="no hooks"):
        collector.collect(n_step=5)


def test_the_unmodified_off_policy_trainer_runs(venv: RayVectorEnv) -> None:
    class Noting(Collector[Any]):
        def collect(self, **kwargs: Any) -> Any:
            stats: Any = super().collect(**kwargs)
            ages.append(stats.staleness)
            return stats

    ages: list[int] = []
    torch.manual_seed(0)
    policy = DiscreteQLearningPolicy(model=kit.body(2, action_shape=2), action_space=DriftEnv.action_space)
    algorithm = DQN(policy=policy, optim=kit.adam())
    collector = Noting(algorithm, venv, VectorReplayBuffer(1000, 5), True, prefetch=True)
    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=tianshou.data.Collector(algorithm, DummyVectorEnv([DriftEnv] * 2)),
            max_epochs=2,
            epoch_num_steps=200,
            collection_step_num_env_steps=20,
            update_step_num_gradient_steps_per_sample=0.1,
            test_step_num_episodes=2,
            batch_size=32,
            verbose=False,
            show_progress=False,
        )
    )
    assert len(ages) == 20 and ages[0] == 0 and set(ages[1:]) == {1}
    collector.reset_env()


def test_other_calls_drop_the_next_chunk() -> None:
    with RayVectorEnv([DriftEnv] * 2, num_nodes=0, workers_per_node=0) as env:
        collector = Collector(Exact(), env, VectorReplayBuffer(100, 2), prefetch=True)
        collector.reset()
        collector.collect(n_step=10)  # and requests the next chunk
        assert collector.collect(n_episode=3).n_collected_episodes == 3
        collector.collect(n_step=10)
        assert collector.collect(n_step=10, random=True).n_collected_steps == 10
