"""One pending chunk: the same chunks, one call earlier; nothing is lost in silence, and no wait is needless."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeVec
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from helpers.chunks import assert_same_chunk, wait_for_parts
from helpers.exact import TablePolicy
from helpers.interrupts import interrupted_at
from helpers.obedient_envs import GatedEnv
from helpers.testing import CountingEnv, FaultyEnv, assert_identical, counting_errors
from helpers.waiting import alive, wait_until

from rayvec.collect.collector import Collector
from rayvec.data import Chunk
from rayvec.errors import ConfigError, WorkerLostError
from rayvec.vector.ray_vec_env import RayVecEnv

TOTAL = 3


@pytest.fixture(scope="module")
def counting(make_module_vec: MakeVec) -> RayVecEnv:
    return make_module_vec([CountingEnv] * 5, nodes=2)


@pytest.fixture
def prefetching(counting: RayVecEnv) -> Any:
    collector = Collector(counting, TablePolicy(), seed=1, prefetch=True)
    yield collector
    collector.close()


@pytest.fixture
def gated(tmp_path: Path, make_vec: MakeVec) -> RayVecEnv:  # the gate outlives the environments
    return make_vec([partial(GatedEnv, tmp_path / "gate")] * 4, nodes=2)


def assert_acted_with(chunk: Chunk, policy: TablePolicy) -> None:
    assert_identical(chunk.extras["logp"], policy.logp_table[chunk.extras["state"], chunk.act])


def test_the_chunks_are_those_without_prefetch(counting: RayVecEnv, prefetching: Collector) -> None:
    ahead = [prefetching.collect(n_step=5 * 12) for _ in range(4)]
    prefetching.close()
    plain = Collector(counting, TablePolicy(), seed=1)
    for batch, expected in zip(ahead, [plain.collect(n_step=5 * 12) for _ in range(4)], strict=True):
        assert_same_chunk(batch.chunks[0], expected.chunks[0])
        assert_identical((batch.stats.returns, batch.stats.lens), (expected.stats.returns, expected.stats.lens))


def test_a_chunk_is_taken_with_the_weights_of_its_beginning(prefetching: Collector) -> None:
    policies = [TablePolicy(), *(TablePolicy(seed=seed) for seed in range(1, 5))]
    versions, staleness = [], []
    for policy in policies[1:]:
        batch = prefetching.collect(n_step=100)
        version = batch.chunks[0].weights_version
        assert_acted_with(batch.chunks[0], policies[version])
        assert batch.stats.weights_versions == (version, version)
        versions.append(version)
        staleness.append(batch.stats.staleness)
        prefetching.set_weights(policy.weights())
    assert versions == [0, 0, 1, 2]
    assert staleness == [0, 1, 1, 1]


def test_publishing_does_not_wait_for_a_pending_chunk(gated: RayVecEnv, tmp_path: Path) -> None:
    """The gate opens only after the weights have been published: a call that waited would wait for ever."""
    collector = Collector(gated, TablePolicy(), seed=1, prefetch=True)
    policies = [TablePolicy(seed=seed) for seed in range(3)]
    collector.collect(n_step=4 * 3)
    for policy in policies[1:]:
        collector.set_weights(policy.weights())
    with pytest.raises(multiprocessing.TimeoutError):
        gated.rollout_wait(timeout=0.01)
    (tmp_path / "gate").touch()
    for version in (0, 2):
        batch = collector.collect(n_step=4 * 3)
        assert batch.stats.weights_versions == (version, version)
        assert_acted_with(batch.chunks[0], policies[version])


def test_the_environments_are_busy_while_a_chunk_is_pending(counting: RayVecEnv, prefetching: Collector) -> None:
    first = prefetching.collect(n_step=50)
    for use in (
        lambda: counting.step(np.zeros(5, int)),
        counting.reset,
        lambda: counting.call("unwrapped"),
        lambda: counting.rollout(TablePolicy(), 1),
        lambda: Collector(counting, TablePolicy()),
    ):
        with pytest.raises(AlreadyPendingCallError, match="rollout"):
            use()
    rest = prefetching.collect(n_step=50, ahead=False)
    assert counting.call("unwrapped")  # the environments are free
    batches = [first, rest, prefetching.collect(n_step=50)]
    assert [(batch.stats.n_collected_steps, batch.stats.n_surplus_steps) for batch in batches] == [(50, 0)] * 3
    chunks = [chunk for batch in batches for chunk in batch.chunks]
    assert counting_errors(chunks) == []
    assert [chunk.first_step for chunk in chunks] == [0, 10, 20]
    prefetching.close()
    assert counting.step(np.zeros(5, int))[0].shape == (5, 4)


def test_another_number_of_steps(prefetching: Collector) -> None:
    """At least as many as were asked for, none twice and none left out."""
    batches = [prefetching.collect(n_step=5 * steps) for steps in (4, 4, 10, 2, 2)]
    assert [[chunk.num_steps for chunk in batch.chunks] for batch in batches] == [[4], [4], [4, 6], [10], [2]]
    chunks = [chunk for batch in batches for chunk in batch.chunks]
    assert [chunk.first_step for chunk in chunks] == [0, 4, 8, 12, 18, 28]
    assert counting_errors(chunks) == []


def test_a_reset_drops_the_pending_chunk_and_says_so(prefetching: Collector) -> None:
    prefetching.collect(n_step=5 * 8)
    prefetching.reset(seed=70)
    batch = prefetching.collect(n_step=5 * 30)
    assert batch.stats.n_surplus_steps == 5 * 8
    assert prefetching.collect(n_step=5 * 30).stats.n_surplus_steps == 0
    (chunk,) = batch.chunks
    assert chunk.obs[0].tolist() == [[70 + i, 0, 0, 0] for i in range(5)]
    assert chunk.first_step == 16, "noise is not used twice"
    ends = [chunk.rew[: t + 1, n].sum() for t, n in np.argwhere(chunk.done)]
    assert batch.stats.n_collected_episodes == len(ends)


def test_ctrl_c_loses_no_steps_but_those_of_a_whole_batch(counting: RayVecEnv) -> None:
    """The next batch is the interrupted one, or follows it where that was complete; the environments stay open."""
    plain = Collector(counting, TablePolicy(), seed=1)
    expected = [plain.collect(n_step=5 * 2) for _ in range(300)]
    plain.close()
    collector, last = Collector(counting, TablePolicy(), seed=1, prefetch=True), -1
    take = partial(collector.collect, n_step=5 * 2)
    for number in itertools.count(step=3):
        uninterrupted = interrupted_at(number, take, "/rayvec/collect/", "/rayvec/vector/")
        batch = uninterrupted or take()
        at = batch.chunks[0].first_step // 2
        assert at - last in (1, 2)
        assert_same_chunk(batch.chunks[0], expected[at].chunks[0])
        assert_identical(batch.stats.returns, expected[at].stats.returns)
        last = at
        if uninterrupted:
            break
    assert number > 60
    collector.close()


def test_ctrl_c_where_the_driver_acts_joins_no_episodes() -> None:
    """It closes the environments, or the next batch continues whole episodes or begins new ones."""
    for number in itertools.count():
        with RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=0) as env:
            collector = Collector(env, TablePolicy(), "driver", seed=1)
            take = partial(collector.collect, n_step=2 * 5)
            take()
            uninterrupted = interrupted_at(number, take, "/rayvec/collect/")
            if not env.closed:
                batch = take()
                lens = [chunk.obs[..., 2][chunk.done] + 1 for chunk in batch.chunks]
                assert_identical(batch.stats.lens, np.concatenate(lens))
        if uninterrupted:
            break
    assert number > 30


@pytest.mark.parametrize("number", [100, 200, 300])
def test_new_episodes_follow_interrupted_ones(counting: RayVecEnv, number: int) -> None:
    """Their first steps are in no batch."""
    collector = Collector(counting, TablePolicy(), seed=1)
    assert interrupted_at(number, partial(collector.collect, n_episode=200), "/rayvec/collect/") is None
    assert (collector.collect(n_step=50).chunks[0].obs[0, :, 2] == 0).all()
    collector.close()


def test_a_fault_in_a_pending_chunk_surfaces_at_the_next_collect(make_vec: MakeVec) -> None:
    env = make_vec([partial(FaultyEnv, "raise", "step", 5)] * 3, workers=2)
    collector = Collector(env, TablePolicy(), seed=0, prefetch=True)
    assert collector.collect(n_step=3 * 5).stats.n_collected_steps == 15
    collector.set_weights(TablePolicy(seed=1).weights())
    with pytest.raises(ValueError, match="this environment is broken") as caught:
        collector.collect(n_step=3 * 5)
    assert "environment 0, seed 0" in str(caught.value.__cause__)
    assert env.closed
    collector.close()


def test_a_worker_lost_between_its_part_and_new_weights(make_vec: MakeVec) -> None:
    """Its part stays; the replacement worker acts with the newest weights, like the others."""
    env = make_vec([CountingEnv] * 4, nodes=2, on_env_error="restart")
    collector = Collector(env, TablePolicy(), seed=1, prefetch=True)
    worker = env.worker_pids()[env.topology.nodes[1].name][1]
    policies = [TablePolicy(seed=seed) for seed in range(2)]
    batches = [collector.collect(n_step=4 * 12)]
    wait_for_parts(env)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not alive(worker), "the worker has ended")
    collector.set_weights(policies[1].weights())
    batches += [collector.collect(n_step=4 * 12) for _ in range(2)]
    [first], [done], [following] = (batch.chunks for batch in batches)
    assert counting_errors([first, done]) == counting_errors([following]) == []
    assert [batch.stats.weights_versions for batch in batches] == [(0, 0), (0, 0), (1, 1)]
    assert [chunk.restarts.tolist() for chunk in (done, following)] == [[], [[-1, 2], [-1, 3]]]
    assert done.valid.all() and following.valid.all()
    assert following.obs[0][:, TOTAL].tolist() == [24, 24, 0, 0]
    assert_acted_with(done, policies[0])
    assert_acted_with(following, policies[1])


def test_a_worker_that_is_lost_with_two_pending_chunks_is_no_lost_node(make_vec: MakeVec, tmp_path: Path) -> None:
    env = make_vec([partial(GatedEnv, tmp_path / "gate")] * 4, nodes=2, on_node_loss="raise")
    env.reset(seed=0)
    worker = env.worker_pids()[env.topology.nodes[env.transports.index("tcp")].name][1]
    store = env.publish(TablePolicy())
    for first_step in (0, 5):
        env.rollout_async(store, 5, first_step, 1)
    os.kill(worker, signal.SIGKILL)
    opens = threading.Timer(1.0, (tmp_path / "gate").touch)  # until then, the other node does not answer
    opens.start()
    with pytest.raises(WorkerLostError, match="killed by signal 9"):
        env.rollout_wait()
    opens.join()


def test_what_cannot_be_combined(counting: RayVecEnv, prefetching: Collector) -> None:
    for mistake in (
        partial(Collector, counting, TablePolicy(), "driver", prefetch=True),
        partial(prefetching.collect, n_episode=3),
    ):
        with pytest.raises(ConfigError, match="prefetch"):
            mistake()
    with pytest.raises(NoAsyncCallError):
        counting.rollout_wait()
