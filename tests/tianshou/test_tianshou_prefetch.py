"""Tianshou's collector with chunks ahead: the buffer of one without, no step lost or twice, no needless wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tianshou.data
import torch
from helpers import tianshou_algorithms as kit
from helpers.exact import DriftEnv
from helpers.obedient_envs import GatedEnv
from helpers.testing import CountingEnv
from helpers.tianshou_buffers import assert_same_buffer
from helpers.tianshou_kit import Exact, Remembers
from tianshou.algorithm import DQN, PPO
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.torch_utils import policy_within_training_step

from rayvec.errors import ConfigError
from rayvec.tianshou import IMPALA, Collector, RayVectorEnv

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


SLOW = range(2)
"""The environments of the first worker, which waits for the gate."""
PRELOAD = ("helpers.tianshou_kit",)


def impala() -> IMPALA:
    torch.manual_seed(0)
    return IMPALA(**kit.actor_critic(4, 2), optim=kit.adam(1e-2), gamma=0.9)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayVectorEnv, Path]]:
    gate = tmp_path_factory.mktemp("gate") / "gate"
    fns = [partial(GatedEnv, gate) if i in SLOW else CountingEnv for i in range(6)]
    env = RayVectorEnv(fns, num_nodes=0, workers_per_node=3, preload=PRELOAD)
    yield env, gate
    gate.touch()
    with suppress(Exception):
        env.close()


@pytest.fixture
def gated(made: tuple[RayVectorEnv, Path]) -> tuple[RayVectorEnv, Path]:
    """Six environments on three workers, of which the first waits for the gate from its fourth step on."""
    env, gate = made
    env.seed(0)
    gate.unlink(missing_ok=True)
    return env, gate


def collect(collector: Any, count: int, num_steps: int = 4) -> list[Any]:
    """Collects, and changes the policy after each call."""
    stats = []
    for _ in range(count):
        stats.append(collector.collect(n_step=num_steps * collector.env_num))
        collector.policy.shift.data.add_(1)
    return stats


def totals(buffer: Any) -> list[list[int]]:
    """Returns how many steps each environment of a CountingEnv had taken after each of its stored steps."""
    return [sub.rew[: len(sub)].astype(int).tolist() for sub in buffer.buffers]


def trained(settings: Any, num_envs: int, workers: int) -> tuple[list[Any], Any, Any]:
    """Trains four times over new environments; returns stats, buffer and algorithm."""
    env = RayVectorEnv([CountingEnv] * num_envs, num_nodes=0, workers_per_node=workers, preload=PRELOAD)
    algorithm = impala()
    collector: Any = Collector(algorithm, env, VectorReplayBuffer(num_envs * 60, num_envs), **settings)
    np.random.seed(0)  # shuffles the minibatches
    env.seed(11)
    collector.reset()
    stats = []
    for _ in range(4):
        collector.reset_buffer(keep_statistics=True)
        with policy_within_training_step(algorithm.policy):
            stats.append(collector.collect(n_step=num_envs * 30))
            algorithm.update(collector.buffer, batch_size=64, repeat=1)
    env.close()
    return stats, collector.buffer, algorithm


@pytest.mark.parametrize(("max_staleness", "num_envs", "workers"), [(1, 6, 3), (8, 3, 0)], ids=["version", "part"])
def test_with_one_version_or_one_part_it_is_lockstep(max_staleness: int, num_envs: int, workers: int) -> None:
    """The same steps, updates and weights, to the last bit, as with `prefetch`."""
    expected, buffer, algorithm = trained({"prefetch": True}, num_envs, workers)
    got, other_buffer, other = trained({"max_staleness": max_staleness}, num_envs, workers)
    assert_same_buffer(other_buffer, buffer)
    for mine, theirs in zip(other.parameters(), algorithm.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine.returns, theirs.returns)
        np.testing.assert_array_equal(mine.lens, theirs.lens)
        assert mine.staleness == theirs.staleness
    assert [each.staleness_counts for each in got] == [(num_envs,), *[(0, num_envs)] * 3]


def test_updates_do_not_wait_for_a_slow_worker(gated: tuple[RayVectorEnv, Path]) -> None:
    """The gate opens after six calls: a collector that waited for the slow worker would wait for ever."""
    env, gate = gated
    collector = Collector(Exact(), env, VectorReplayBuffer(6 * 200, 6), max_staleness=8)
    collector.reset()
    stats = collect(collector, 6)
    assert [len(each) for each in totals(collector.buffer)[:2]] == [0, 0]
    assert all(each.n_collected_steps == 24 for each in stats)
    gate.touch()
    stats += collect(collector, 6)
    assert max(each.staleness for each in stats) in (6, 7, 8), "the first chunk is for the first of 8 calls"
    assert all(each.staleness == len(each.staleness_counts) - 1 for each in stats)
    assert all(4 * sum(each.staleness_counts) == each.n_collected_steps for each in stats)
    taken = totals(collector.buffer)
    assert all(each == list(range(1, len(each) + 1)) for each in taken) and all(taken)
    assert sum(map(len, taken)) == collector.collect_step == sum(each.n_collected_steps for each in stats)
    ends = sum(int(sub.done[: len(sub)].sum()) for sub in collector.buffer.buffers)
    assert ends == collector.collect_episode == sum(len(each.returns) for each in stats)
    collector.reset()
    assert not len(collector.buffer)
    collect(collector, 1)
    assert all((sub.obs[: len(sub)][:1, 2] == 0).all() for sub in collector.buffer.buffers)
    collector.reset_env()


def test_no_call_overwrites_its_own_steps(gated: tuple[RayVectorEnv, Path]) -> None:
    """Each sub-buffer holds two chunks. One fast worker of three then waits for the other."""
    env, gate = gated
    collector = Collector(Exact(), env, VectorReplayBuffer(6 * 9, 6), max_staleness=30)
    collector.reset()
    last = [0] * 6
    for _ in range(8):
        collector.reset_buffer(keep_statistics=True)
        collect(collector, 1)
        for env_id, taken in enumerate(totals(collector.buffer)):
            assert taken == list(range(last[env_id] + 1, last[env_id] + 1 + len(taken))) and len(taken) <= 8
            last[env_id] += len(taken)
    assert last[:2] == [0, 0] and min(last[2:]) > 0
    gate.touch()
    with pytest.raises(ConfigError, match="room for 9 steps of each"):
        collect(collector, 1, num_steps=5)
    collector.reset_env()


def test_other_calls_drop_the_next_chunk() -> None:
    with RayVectorEnv([DriftEnv] * 2, num_nodes=0, workers_per_node=0) as env:
        collector = Collector(Exact(), env, VectorReplayBuffer(100, 2), max_staleness=2)
        collector.reset()
        collector.collect(n_step=10)  # and requests the next chunk
        assert collector.collect(n_episode=3).n_collected_episodes == 3
        collector.collect(n_step=10)
        assert collector.collect(n_step=10, random=True).n_collected_steps == 10
