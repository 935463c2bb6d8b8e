"""Tianshou's collector with `max_staleness`: workers deliver chunks independently, and no step is lost or twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tianshou_algorithms as kit
from helpers.exact import DriftEnv
from helpers.obedient_envs import GatedEnv
from helpers.testing import CountingEnv
from helpers.tianshou_buffers import assert_same_buffer
from helpers.tianshou_kit import Exact
from tianshou.data import VectorReplayBuffer
from tianshou.utils.torch_utils import policy_within_training_step

from rayvec.errors import ConfigError
from rayvec.tianshou import IMPALA, Collector, RayVectorEnv

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
