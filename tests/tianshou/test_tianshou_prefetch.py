"""The prefetching Collector fills the buffer that one without prefetch fills with the policies in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tianshou.data
import torch
from helpers.exact import DriftEnv
from helpers.tianshou_buffers import assert_same_buffer
from helpers.tianshou_kit import Exact, Remembers
from tianshou.algorithm import DQN, PPO
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

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


def test_other_numbers_of_steps(venv: RayVectorEnv) -> None:
    """Pending steps count; missing ones are taken at once, with the newest policy."""
    collector, _ = pair(venv, Exact)
    taken = []
    for n_step in (50, 100, 50, 25, 25):
        collector.policy.shift.data.add_(1)
        taken.append((collector.collect(n_step=n_step).n_collected_steps, len(collector.buffer)))
    assert taken == [(50, 50), (100, 150), (100, 250), (50, 300), (25, 325)]
    stats = collector.collect(n_step=60, random=True)
    assert stats.n_collected_steps == 60
    collector.collect(n_step=60)
    collector.reset_env()


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("random", [False, True])
def test_an_interrupted_wait_loses_nothing(
    venv: RayVectorEnv, prefetch: bool, random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a chunk is waited for, as in a notebook: it is the first of the next call."""
    mine, other = pair(venv, Exact)
    if not prefetch:
        mine = Collector(Exact(), venv, VectorReplayBuffer(2000, 5))
        venv.seed(SEEDS)
        mine.reset()
    wait, interrupts = venv.rollout_wait, [True, False]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt
        return wait(*args, **kwargs)

    monkeypatch.setattr(venv, "rollout_wait", interrupted)
    mine.collect(n_step=50, random=random)
    with pytest.raises(KeyboardInterrupt):
        mine.collect(n_step=50, random=random)
    with pytest.raises(AssertionError, match="prefetching"):
        venv.reset()
    mine.collect(n_step=50, random=random)
    if random:
        assert len(mine.buffer) == 100 and set(np.unique(mine.buffer.act).tolist()) == {0, 1}
    else:
        other.collect(n_step=100)
        assert_same_buffer(mine.buffer, other.buffer)
    interrupts.append(True)
    with pytest.raises(KeyboardInterrupt):
        mine.collect(n_step=50)
    assert mine.reset() is not None
    assert venv.step(np.zeros(5, int))[1].shape == (5,)  # the environments are free
    mine.reset_env()  # frees the environments for the next test


def test_a_reset_drops_the_pending_chunk(venv: RayVectorEnv) -> None:
    collector, _ = pair(venv, Exact)
    collector.collect(n_step=50)
    with pytest.raises(AssertionError, match="prefetching"):
        venv.reset()
    with pytest.raises(AssertionError, match="prefetching"):
        venv.step(np.zeros(5, int))
    collector.reset()
    assert len(collector.buffer) == 0
    venv.step(np.zeros(5, int))
    collector.reset()
    starts = collector.collect(n_step=5)
    assert starts.n_collected_steps == 5 and starts.staleness == 0
    collector.reset_env()


def actor_critic() -> dict[str, Any]:
    actor = DiscreteActor(preprocess_net=Net(state_shape=(2,), hidden_sizes=[8]), action_shape=2, softmax_output=False)
    critic = DiscreteCritic(preprocess_net=Net(state_shape=(2,), hidden_sizes=[8]))
    policy = DiscreteActorPolicy(actor=actor, action_space=DriftEnv.action_space)
    return {"policy": policy, "critic": critic, "optim": AdamOptimizerFactory(lr=1e-3)}


def test_what_cannot_be_prefetched_is_refused(venv: RayVectorEnv) -> None:
    ppo = PPO(**actor_critic())
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
    torch.manual_seed(0)
    policy = DiscreteQLearningPolicy(
        model=Net(state_shape=(2,), action_shape=2, hidden_sizes=[16]),
        action_space=DriftEnv.action_space,
        eps_training=0.3,
        eps_inference=0.0,
    )
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3))
    collector = Collector(algorithm, venv, VectorReplayBuffer(1000, 5), True, prefetch=True)
    ages: list[int] = []
    collect = collector.collect

    def noting(**kwargs: Any) -> Any:
        stats = collect(**kwargs)
        ages.append(stats.staleness)
        return stats

    collector.collect = noting  # type: ignore[method-assign]
    test_env = DummyVectorEnv([DriftEnv] * 2)
    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=tianshou.data.Collector(algorithm, test_env),
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
    assert result.timing.train_time > 0
    assert len(ages) == 20 and ages[0] == 0 and set(ages[1:]) == {1}
    collector.reset_env()
