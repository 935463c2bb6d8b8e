"""Asynchronous collecting: parts go on by themselves, updates do not wait for slow ones, and no step is lost."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeVec
from helpers.chunks import assert_same_chunk
from helpers.exact import TablePolicy
from helpers.obedient_envs import GatedEnv, Opener, Uneven
from helpers.testing import CountingEnv, assert_identical, counting_errors
from helpers.waiting import alive, wait_until

import rayvec
from rayvec.collect.collector import Collector
from rayvec.data import Batch, Chunk
from rayvec.errors import ConfigError
from rayvec.vector.ray_vec_env import RayVecEnv

SLOW = range(2)
"""The environments of the first worker, which waits for the gate."""


def columns_of(batches: Sequence[Batch]) -> dict[int, list[Chunk]]:
    """Returns the chunks of each environment, in the order in which they came."""
    found: dict[int, list[Chunk]] = defaultdict(list)
    for batch in batches:
        (chunk,) = batch.chunks
        for column, env_id in enumerate(chunk.env_ids.tolist()):
            found[env_id].append(chunk.columns(column, column + 1))
    return dict(found)


def assert_complete(batches: Sequence[Batch], env_ids: Sequence[int]) -> None:
    """Every step of every environment is in one batch, in order, and each of its episodes is counted once."""
    columns = columns_of(batches)
    assert sorted(columns) == list(env_ids)
    returns = []
    for chunks in columns.values():
        assert counting_errors(chunks) == []
        totals = np.concatenate([chunk.rew[chunk.valid] for chunk in chunks])
        assert totals.tolist() == list(range(1, len(totals) + 1))
        ends = np.flatnonzero(np.concatenate([chunk.done[chunk.valid] for chunk in chunks]))
        returns += [float(each.sum()) for each in np.split(totals, ends + 1)[:-1]]
    assert sorted(np.concatenate([batch.stats.returns for batch in batches]).tolist()) == sorted(returns)
    assert sum(batch.stats.n_collected_steps for batch in batches) == sum(
        int(chunk.valid.sum()) for chunks in columns.values() for chunk in chunks
    )


def gated(gate: Path, **settings: Any) -> RayVecEnv:
    """Six environments on three workers, of which the first waits for the gate from its fourth step on."""
    fns = [partial(GatedEnv, gate) if i in SLOW else CountingEnv for i in range(6)]
    return RayVecEnv(fns, num_nodes=0, workers_per_node=3, **settings)


def collect(collector: Collector, count: int, num_steps: int = 4, *, ahead: bool = True) -> list[Batch]:
    """Collects batches of so many steps of six environments."""
    batches = []
    for _ in range(count):
        batches.append(collector.collect(n_step=6 * num_steps, ahead=ahead))
        collector.set_weights(TablePolicy(seed=collector.state_dict()["version"] + 1).weights())
    return batches


@pytest.mark.parametrize("workers", [0, 3])
def test_one_version_old_is_lockstep(workers: int) -> None:
    found: list[list[Batch]] = []
    states = []
    for settings in ({"prefetch": True}, {"max_staleness": 1}):
        with RayVecEnv([CountingEnv] * 5, num_nodes=0, workers_per_node=workers) as env:
            collector = Collector(env, TablePolicy(), seed=1, **settings)  # type: ignore[arg-type]
            found.append([*collect(collector, 4, 12), *collect(collector, 1, 12, ahead=False)])
            states.append(collector.state_dict())
            collector.close()
    for got, expected in zip(*found, strict=True):
        assert_same_chunk(got.chunks[0], expected.chunks[0])
        for name in ("returns", "lens", "weights_versions", "staleness", "n_surplus_steps"):
            assert_identical(getattr(got.stats, name), getattr(expected.stats, name), name)
    assert states[0] == states[1]
    assert [batch.stats.staleness_counts for batch in found[1]] == [(5,), *[(0, 5)] * 4]


def test_updates_do_not_wait_for_a_slow_worker(tmp_path: Path) -> None:
    """The gate opens after eight batches: a collector that waited for the slow worker would wait for ever."""
    with gated(tmp_path / "gate") as env:
        collector = Collector(env, TablePolicy(), seed=1, max_staleness=20)
        batches = collect(collector, 8)
        assert not set(columns_of(batches)) & set(SLOW)
        assert all(batch.chunks[0].num_envs == 6 for batch in batches)
        (tmp_path / "gate").touch()
        last = collect(collector, 1, ahead=False)
        assert last[0].stats.staleness == 8 == len(last[0].stats.staleness_counts) - 1
        assert env.call("unwrapped")  # the environments are free
        batches += last
        assert_complete(batches, range(6))
        assert collector.state_dict()["first_step"] == max(len(each) for each in columns_of(batches).values()) * 4
        batches += collect(collector, 1, ahead=False)
        assert_complete(batches, range(6))


def test_a_chunk_that_would_become_too_old_is_waited_for(tmp_path: Path) -> None:
    """The other worker opens the gate in its sixth chunk, which the third call requests: without a wait, the third
    batch would have that and the fifth one alone, long before the slow worker has ended its chunk."""
    slow = [partial(lambda gate: Uneven(GatedEnv(gate, 0), 0.01), tmp_path / "gate")] * 2
    fast = [partial(Opener, tmp_path / "gate", 6 * 6)] * 2
    with RayVecEnv([*slow, *fast], num_nodes=0, workers_per_node=2) as env:
        collector = Collector(env, TablePolicy(), seed=1, max_staleness=3)
        batches = [*collect(collector, 6), *collect(collector, 1, ahead=False)]
        assert [set(columns_of([batch])) & set(SLOW) for batch in batches[:3]] == [set(), set(), set(SLOW)]
        assert all(batch.stats.staleness <= 3 for batch in batches)
        assert_complete(batches, range(4))


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Its episodes end, the other workers go on, and what it had finished stays."""
    with gated(tmp_path / "gate", on_env_error="restart") as env:
        pids = [pid for node in env.worker_pids().values() for pid in node][1:]
        collector = Collector(env, TablePolicy(), seed=1, max_staleness=50)
        batches = collect(collector, 2)
        for pid in (pids[0], pids[2]):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not alive(pid), "the worker has ended")  # type: ignore[misc]
        batches += collect(collector, 4)
        (tmp_path / "gate").touch()
        batches += collect(collector, 1, ahead=False)
    columns = columns_of(batches)
    assert sorted(columns) == list(range(6))
    assert sum(batch.stats.n_restarts for batch in batches) == 4
    for env_id, chunks in columns.items():
        assert chunks[0].first_step == 0
        restarts = [number for number, chunk in enumerate(chunks) if len(chunk.restarts)]
        assert len(restarts) == (env_id not in (2, 3))
        for part in np.split(np.arange(len(chunks)), restarts):
            assert counting_errors([chunks[number] for number in part]) == []


def test_a_reset_drops_what_is_pending_and_says_so() -> None:
    with RayVecEnv([CountingEnv] * 4, num_nodes=0, workers_per_node=2) as env:
        collector = Collector(env, TablePolicy(), seed=1, max_staleness=4)
        collect(collector, 3)
        collector.reset(seed=70)
        batches = [*collect(collector, 2), *collect(collector, 1, ahead=False)]
        assert batches[0].stats.n_surplus_steps in {2 * 6 * count for count in (2, 3, 4)}  # one or two of each worker
        assert batches[1].stats.n_surplus_steps == 0
        for env_id, chunks in columns_of(batches).items():
            assert chunks[0].obs[0].tolist() == [[70 + env_id, 0, 0, 0]]
        assert_complete(batches, range(4))
        state = collector.state_dict()
        collect(collector, 1)
        collector.load_state_dict(state)
        collector.reset(seed=3)
        again = collect(collector, 1)[0].chunks[0]
        assert again.first_step == state["first_step"], "noise is not used twice"
        collector.close()


def test_what_cannot_be_combined() -> None:
    with RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=0) as env:
        for settings in ({"inference": "driver"}, {"max_staleness": 0}):
            with pytest.raises(ConfigError, match="max_staleness"):
                Collector(env, TablePolicy(), **{"max_staleness": 2, **settings})  # type: ignore[arg-type]
        collector = Collector(env, TablePolicy(), max_staleness=2)
        with pytest.raises(ConfigError, match="max_staleness"):
            collector.collect(n_episode=2)
        collector.close()
    for changes in ({"prefetch": False}, {"num_learners": 2}, {"learners": "decentralized"}):
        with pytest.raises(ConfigError, match="max_staleness"):
            rayvec.IMPALAConfig(max_staleness=2, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_nodes_deliver_chunks_when_they_are_ready(make_vec: MakeVec, tmp_path: Path) -> None:
    """The driver's own node waits for the gate."""
    env = make_vec([partial(GatedEnv, tmp_path / "gate")] * 2 + [CountingEnv] * 2, nodes=2)
    collector = Collector(env, TablePolicy(), seed=1, max_staleness=50)
    batches = collect(collector, 5)
    assert set(columns_of(batches)) == {2, 3}
    (tmp_path / "gate").touch()
    batches += collect(collector, 1, ahead=False)
    assert_complete(batches, range(4))


def test_a_batch_has_as_many_steps_as_were_asked_for() -> None:
    """Chunks that a call before has requested are shorter, or longer."""
    with RayVecEnv([CountingEnv] * 6, num_nodes=0, workers_per_node=3) as env:
        collector = Collector(env, TablePolicy(), seed=1, max_staleness=3)
        asked = (12, 120, 12, 60, 60)
        batches = [collector.collect(n_step=count) for count in asked]
        batches.append(collector.collect(n_step=600, ahead=False))
        counts = [batch.stats.n_collected_steps for batch in batches]
        assert all(count >= least for count, least in zip(counts, (*asked, 600), strict=True))
        batches.append(collector.collect(n_step=12, ahead=False))
        assert batches[-1].stats.n_collected_steps == 12
        assert_complete(batches, range(6))
