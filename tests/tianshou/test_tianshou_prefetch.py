"""The prefetching Collector fills the buffer that one without prefetch fills with the policies in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
import tianshou.data
import torch
from helpers import tianshou_algorithms as kit
from helpers.exact import DriftEnv
from helpers.testing import CountingEnv
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


class Interrupted(RayVectorEnv):
    """Raises KeyboardInterrupt in the next wait for a chunk if it is told to, as after Ctrl-C in a notebook."""

    interrupt = False

    def _interrupted(self) -> None:
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt

    def rollout_wait(self, *args: Any, **kwargs: Any) -> Any:
        self._interrupted()
        return super().rollout_wait(*args, **kwargs)

    def part_wait(self, *args: Any, **kwargs: Any) -> Any:
        self._interrupted()
        return super().part_wait(*args, **kwargs)


@pytest.mark.parametrize("settings", [{}, {"prefetch": True}, {"max_staleness": 3}], ids=str)
def test_an_interrupted_wait_loses_nothing(settings: dict[str, Any]) -> None:
    """A chunk that was waited for at Ctrl-C is the first of the next call."""
    env = Interrupted([CountingEnv] * 5, num_nodes=0, workers_per_node=2, preload=("helpers.tianshou_kit",))
    with closing(env):
        env.seed(SEEDS)
        collector: Any = Collector(Exact(), env, VectorReplayBuffer(2000, 5), **settings)
        collector.reset()
        collector.collect(n_step=50)
        env.interrupt = True
        with pytest.raises(KeyboardInterrupt):
            collector.collect(n_step=50)
        with pytest.raises(AssertionError, match="prefetching"):
            env.reset()
        collector.collect(n_step=50)
        collector.collect(n_step=50)
        for sub in collector.buffer.buffers:  # the steps of each environment, none lost or twice
            assert sub.rew[: len(sub)].tolist() == list(range(1, len(sub) + 1))
        assert len(collector.buffer) == collector.collect_step
        env.interrupt = True
        with pytest.raises(KeyboardInterrupt):
            collector.collect(n_step=50)
        collector.reset()
        assert env.step(np.zeros(5, int))[1].shape == (5,)  # the environments are free


@pytest.mark.parametrize("ahead", [{"prefetch": True}, {"max_staleness": 2}], ids=str)
def test_what_cannot_be_collected_ahead_is_refused(venv: RayVectorEnv, ahead: dict[str, Any]) -> None:
    ppo = PPO(**kit.actor_critic(2, 2), optim=kit.adam())
    for policy, env, settings, words in (
        (ppo, venv, {}, "its present policy"),
        (ppo.policy, venv, {}, "its present policy"),
        (Exact(), venv, {"inference": "driver"}, "inference='worker'"),
        (Exact(), venv, {"max_staleness": 0}, "max_staleness"),
        (Exact(), DummyVectorEnv([DriftEnv] * 2), {}, "RayVectorEnv"),
    ):
        with pytest.raises(ConfigError, match=words):
            Collector(policy, env, **{**ahead, **settings})  # type: ignore[arg-type]
    collector = Collector(Exact(), venv, **ahead)
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
