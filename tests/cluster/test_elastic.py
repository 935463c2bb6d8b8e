"""Elastic nodes: environments move as nodes join and leave, and no transition is wrong."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium.vector import SyncVectorEnv
from helpers.elastic import Nodes, envs_by_node, first_actions, until_moved, without_cores_elsewhere
from helpers.examples import examples
from helpers.testing import CountingEnv, assert_identical, counting_errors
from helpers.waiting import alive, wait_until
from hypothesis import example, given, strategies as st
from soak.auditor import Auditor
from soak.witness import Asking, Witness

from rayvec.cluster.placement import assign_parts
from rayvec.collect.collector import Collector
from rayvec.errors import ConfigError, NodeLostError
from rayvec.fleet.restarts import RESTARTS_OF_A_NODE, restart_seed
from rayvec.vector.ray_vec_env import RayVecEnv
from rayvec.wrappers import SaveState

SEED, _, STEP, TOTAL = range(4)

pytestmark = pytest.mark.timeout(600)  # nodes are slow to start where others work


@given(
    st.lists(st.sampled_from([None, *"abcdef"]), min_size=1, max_size=40),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 64), min_size=1),
)
@example([None] * 15, {"a": 19, "b": 25, "c": 25, "d": 59, "e": 63, "f": 64})  # equal remainders of unequal weights
@examples(300)
def test_assigned_parts_are_balanced_and_stay_where_they_can(current: list[Any], weights: dict[str, int]) -> None:
    found = assign_parts(current, weights)
    counts = {node: found.count(node) for node in weights}
    assert sum(counts.values()) == len(current)
    for node, count in counts.items():
        exact = len(current) * weights[node] / sum(weights.values())
        assert math.floor(exact + 1e-9) <= count <= math.ceil(exact - 1e-9), (node, count, exact)
        stays = sum(old == new == node for old, new in zip(current, found, strict=True))
        assert stays == min(count, current.count(node))
    assert assign_parts(found, weights) == found


@pytest.mark.usefixtures("ray_cluster")
def test_fewer_nodes_than_the_least_number() -> None:
    """It waits up to the limit for a start, and says what it found."""
    with pytest.raises(ConfigError, match=r"need 2 CPU on each of 3 nodes"):
        RayVecEnv([CountingEnv] * 4, num_nodes=(3, 4), workers_per_node=2, start_timeout_s=0.2)


def is_right(chunks: list[Any]) -> bool:
    """Whether chunks of CountingEnv have no error but at a boundary over which an environment moved."""
    moved = [(number, n) for number, chunk in enumerate(chunks) for t, n in chunk.restarts if t < 0]
    starts = [f"a chunk begins where the last one ended: chunk {number}, place [{n}]" for number, n in moved]
    ends = [f"chunk {number - 1}, place [{chunks[number - 1].num_steps - 1}, {n}]" for number, n in moved if number]
    errors = [error for error in counting_errors(chunks) if error not in starts and not error.endswith(tuple(ends))]
    assert errors == []
    return True


@pytest.mark.usefixtures("ray_cluster")
def test_environments_are_those_of_sync_vector_env_and_move_when_cores_come_free() -> None:
    """A node whose cores are claimed is none; once they are free, its share moves, and begins new episodes."""
    with without_cores_elsewhere() as free:
        env = RayVecEnv([CountingEnv] * 6, num_nodes=(1, 2), workers_per_node=2)
        sync = SyncVectorEnv([CountingEnv] * 6)
        with env:
            assert [*envs_by_node(env).values()] == [[*range(6)]] and {*env.transports} == {"shm"}
            assert_identical(env.reset(seed=1), sync.reset(seed=1))
            for _ in range(5):  # both parts, which are here, raise: each answer is that of its own request
                with pytest.raises(AttributeError, match="missing"):
                    env.get_attr("missing")
            for _ in range(20):
                assert_identical(env.step(np.zeros(6, int)), sync.step(np.zeros(6, int)))
            free()
            for _ in range(3):  # no boundary of a chunk or a reset
                assert_identical(env.step(np.zeros(6, int)), sync.step(np.zeros(6, int)))
            chunks: list[Any] = []
            (other,) = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(envs_by_node(env))

            def advance() -> None:
                chunks.append(env.rollout(first_actions, 3))
                assert chunks[-1].rew.shape == (3, 6) and chunks[-1].env_ids.tolist() == list(range(6))

            found = until_moved(env, advance, [None, other])
            moved = found[other]
            assert len(moved) == 3 and env.transports == ("shm", "tcp")
            assert {t for t, _ in chunks[-1].restarts} <= {-1} and is_right(chunks)
            assert {n for _, n in chunks[-1].restarts} <= set(moved)  # the others were between two episodes
            seeds = [restart_seed(1 + n, n, RESTARTS_OF_A_NODE) for n in moved]
            assert chunks[-1].obs[0, moved, SEED].tolist() == seeds
            pids = env.worker_pids()
            assert [len(pids[node.name]) - 1 for node in env.topology.nodes] == [2, 2]
            assert_identical(env.reset(seed=1), sync.reset(seed=1))
            for _ in range(20):
                assert_identical(env.step(np.zeros(6, int)), sync.step(np.zeros(6, int)))
        sync.close()


@pytest.mark.usefixtures("ray_cluster")
def test_episodes_continue_where_environments_that_save_their_state_move(caplog: pytest.LogCaptureFixture) -> None:
    makes = [lambda: SaveState(CountingEnv(1000))] * 6
    with without_cores_elsewhere() as free, RayVecEnv(makes, num_nodes=(1, 2), workers_per_node=1) as env:
        env.reset(seed=1)
        free()
        (other,) = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(envs_by_node(env))
        chunks: list[Any] = []
        until_moved(env, lambda: chunks.append(env.rollout(first_actions, 3)), [None, other])
        chunks.append(env.rollout(first_actions, 3))
    assert "moved from node" in caplog.text
    assert not any(len(chunk.restarts) for chunk in chunks)
    assert counting_errors(chunks) == []


class Stumbles(CountingEnv):
    """When a state is first asked for, the driver gets Ctrl-C, or the worker dies. Its folder names its processes."""

    def __init__(self, folder: Path, driver: int | None) -> None:
        super().__init__()
        self._folder, self._driver = folder, driver
        (folder / str(os.getpid())).touch()

    def get_state(self) -> None:
        if not (self._folder / "asked").exists():
            (self._folder / "asked").touch()
            if self._driver is None:
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(self._driver, signal.SIGINT)

    def set_state(self, state: Any) -> None:
        """Does nothing."""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("driver", [None, os.getpid()], ids=["the worker dies", "Ctrl-C"])
def test_a_fault_while_the_state_of_an_environment_that_moves_is_read(
    driver: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    makes = [partial(Stumbles, tmp_path, driver)] * 2
    settings: dict[str, Any] = {"num_nodes": (1, 2), "workers_per_node": 1, "on_env_error": "restart"}
    with without_cores_elsewhere() as free, RayVecEnv(makes, **settings) as env:
        env.reset(seed=1)
        free()
        (other,) = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(envs_by_node(env))
        with pytest.raises(KeyboardInterrupt) if driver else nullcontext():
            until_moved(env, env.reset, [None, other])
        assert driver or "worker 0 died" in caplog.text
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert driver or len(pids) >= 3
    wait_until(lambda: not any(map(alive, pids)), "no worker is left")


@pytest.fixture
def nodes(ray_cluster: Any) -> Iterator[Nodes]:
    """What adds nodes to the shared cluster; its own second node has no free cores meanwhile."""
    made = Nodes(ray_cluster)
    with without_cores_elsewhere():
        yield made
        made.close()


@pytest.fixture
def witnesses(tmp_path: Path, nodes: Nodes) -> Iterator[RayVecEnv]:
    """Twelve environments on one to three nodes, that say who they are."""
    makes = [partial(Witness, index, tmp_path) for index in range(12)]
    with RayVecEnv(makes, num_nodes=(1, 3), workers_per_node=2) as env:
        yield env


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["worker", "node", "driver"])
def test_nodes_join_and_leave_between_chunks(witnesses: RayVecEnv, nodes: Nodes, inference: Any) -> None:
    """Every transition is right; a fourth node is ignored until one of three leaves."""
    env, auditor = witnesses, Auditor(witnesses.reset(seed=1)[0])
    policy = Asking()

    def advance() -> None:
        auditor.chunk(env.rollout(policy, 10, inference))

    first = nodes.join()
    until_moved(env, advance, [None, first])
    second = nodes.join()
    assert auditor.seen["restarts"] == 6
    held = until_moved(env, advance, [None, first, second])
    assert [len(each) for each in held.values()] == [4, 4, 4] and auditor.seen["restarts"] == 10
    third = nodes.join()
    advance()
    assert third not in envs_by_node(env)
    nodes.announce(first)
    assert until_moved(env, advance, [None, second, third])[third] == held[first]
    assert auditor.seen["restarts"] == 14
    nodes.kill(first)
    nodes.kill(third)  # without notice
    until_moved(env, advance, [None, second])
    nodes.announce(second)
    until_moved(env, advance, [None])
    assert auditor.seen["restarts"] == 24
    nodes.close()
    advance()


@pytest.mark.slow
def test_a_node_that_announces_leaves_between_steps(
    witnesses: RayVecEnv, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps do not wait for a reset to leave a node; a node that joins waits for the reset."""
    env, auditor = witnesses, Auditor(witnesses.reset(seed=1)[0])

    def step() -> None:
        auditor.step(*env.step(np.zeros(12, np.int64)))

    def reset() -> None:
        obs, _ = env.reset()
        auditor.__init__(obs)  # type: ignore[misc]

    first = nodes.join()
    for _ in range(100):
        step()
    assert len(envs_by_node(env)) == 1
    held = until_moved(env, reset, [None, first])
    with caplog.at_level(logging.WARNING):
        nodes.announce(first)
        until_moved(env, step, [None])
    step()
    assert auditor.seen["restarts"] == len(held[first]) == 6
    assert "(it leaves) to node" in caplog.text and "is lost" not in caplog.text
    nodes.kill(first)
    step()


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [None, 4], ids=["all together", "part by part"])
def test_a_collector_with_prefetch(nodes: Nodes, max_staleness: int | None) -> None:
    """Batches keep their size, and no transition is wrong, whatever is pending when environments move."""
    with RayVecEnv([partial(CountingEnv, 5)] * 6, num_nodes=(1, 2), workers_per_node=1) as env:
        collector = Collector(env, first_actions, prefetch=True, seed=3, max_staleness=max_staleness)
        collector.reset(seed=1)
        chunks = []

        def advance() -> None:
            batch = collector.collect(n_step=60)
            assert batch.stats.n_collected_steps == 60
            chunks.extend(batch.chunks)

        first = nodes.join()
        until_moved(env, advance, [None, first])
        nodes.kill(first, by_sigterm=bool(max_staleness))
        until_moved(env, advance, [None])

        def told() -> bool:
            """Whether a chunk of the environments that have moved is in a batch: it may be pending for long."""
            advance()
            return any(len(chunk.restarts) for chunk in chunks)

        wait_until(told, "a chunk tells of the loss")
        for chunk in chunks:
            before, after = chunk.obs[chunk.valid], chunk.next_obs()[chunk.valid]
            assert (after[:, TOTAL] == before[:, TOTAL] + 1).all() and (after[:, :STEP] == before[:, :STEP]).all()
        collector.close()


@pytest.mark.slow
def test_too_few_nodes_remain(nodes: Nodes) -> None:
    """Environments stay on a node that announces to leave; once it is gone, it is one clear error."""
    first = nodes.join()
    with RayVecEnv([CountingEnv] * 4, num_nodes=(2, 3), workers_per_node=1) as env:
        env.reset(seed=1)
        nodes.announce(first)
        chunks = [env.rollout(first_actions, 10) for _ in range(20)]
        assert first in envs_by_node(env) and counting_errors(chunks) == []
        nodes.kill(first)
        with pytest.raises(NodeLostError, match=r"lost .*Fewer nodes than min remain for num_nodes=\(2, 3\)"):
            env.rollout(first_actions, 10)
        assert env.closed
