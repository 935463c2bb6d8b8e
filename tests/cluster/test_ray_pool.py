"""RayPool as a pool: subsets, order, waiting, attributes; over shared memory and over the stream at once."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.examples import examples
from helpers.kinds import (
    ALL_SPACES,
    answer,
    assert_same_batch,
    env_fns,
    factory,
    pools_in_lockstep,
    sample_actions,
    within,
)
from helpers.odd_envs import InterruptsItsClose
from helpers.testing import CountingEnv, TimedEnv
from helpers.waiting import alive, wait_until
from hypothesis import HealthCheck, given, strategies as st

from rayvec.cluster import remote_node
from rayvec.cluster.node_supervisor import NodeSupervisor
from rayvec.cluster.placement import FreeNode, free_nodes, plan_topology
from rayvec.cluster.ray_pool import RayPool
from rayvec.cluster.tcp_stream import FrameSocket, connect
from rayvec.collect.collector import Collector
from rayvec.data import NodeSlice, StepBatch
from rayvec.errors import NodeLostError
from rayvec.policies.noise import NO_NOISE
from rayvec.pools.base import Autoreset
from rayvec.pools.step_and_autoreset import SerialPool
from rayvec.vector.ray_vec_env import RayVecEnv

DEADLINE_S = 20.0
MakePool = Callable[..., RayPool]


@pytest.fixture(scope="module")
def make_pool(ray_cluster: object) -> Iterator[MakePool]:
    """Makes pools over both nodes, with a stream to the second; and closes them in the end."""
    pools: list[RayPool] = []

    def make(fns: list[Callable[[], Any]], workers: int = 1, nodes: int = 2, loose: bool = False) -> RayPool:
        topology = plan_topology(free_nodes(), len(fns), nodes, workers, worker_per_env=loose)
        pool = RayPool(NodeSupervisor(factory(fns), topology, loose=loose))
        pools.append(pool)
        pool.allocate(pool.spaces.observation, pool.spaces.action)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(
    "mode", [Autoreset(0), *(pytest.param(mode, marks=pytest.mark.slow) for mode in list(Autoreset)[1:])]
)
@pytest.mark.parametrize("kind", [pytest.param("nested", marks=pytest.mark.slow), "custom"])
def test_equals_the_serial_pool(make_pool: MakePool, kind: str, mode: Autoreset) -> None:
    space = ALL_SPACES[kind]
    fns = env_fns(5, space, space)
    pool = make_pool(fns, 2)
    assert pool.transports == ("shm", "tcp")
    with closing(SerialPool(factory(fns))) as serial:
        pools_in_lockstep(pool, serial, space, mode, num_steps=8)
    pool.close()


class TestSubsets:
    @pytest.fixture(scope="class", params=["dict", pytest.param("dict_of_text", marks=pytest.mark.slow)])
    @classmethod
    def pool(cls, request: pytest.FixtureRequest, make_pool: MakePool) -> Any:
        space = ALL_SPACES[request.param]
        pool = make_pool(env_fns(6, space, space), 2)
        yield pool, space
        pool.close()

    @examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_subsets_in_any_order_equal_the_serial_pool(self, pool: Any, data: st.DataObject) -> None:
        ours, space = pool
        with closing(SerialPool(factory(env_fns(6, space, space)))) as serial:
            everyone = np.arange(6)
            for p in (serial, ours):
                p.reset(everyone, list(range(6)))
            assert_same_batch(answer(ours, everyone), answer(serial, everyone))
            under_way: list[np.ndarray] = []
            try:
                for number in range(data.draw(st.integers(1, 10), "operations")):
                    idle = sorted(set(range(6)) - {i for ids in under_way for i in ids.tolist()})
                    if idle and (not under_way or data.draw(st.booleans(), "send")):
                        chosen = data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True), "ids")
                        ids = np.array(chosen, np.int64)
                        kind = data.draw(st.sampled_from(["send", "send", "send", "reset", "ready"]), "kind")
                        for p in (serial, ours):
                            if kind == "send":
                                p.send(ids, sample_actions(space, len(ids), number), Autoreset.SAME_STEP)
                            elif kind == "reset":
                                p.reset(ids, [None] * len(ids), {"n": number})
                            else:
                                p.begin_episodes(ids)
                        under_way.append(ids)
                    else:
                        ids = under_way.pop(data.draw(st.integers(0, len(under_way) - 1), "which"))
                        assert_same_batch(answer(ours, ids), answer(serial, ids))
                if under_way:
                    rest, under_way = under_way, []
                    assert_same_batch(answer(ours, None), answer(serial, None))
                    assert rest
            finally:
                for ids in under_way:  # so that the next example finds nothing under way
                    ours.recv(ids)

    def test_calls_go_to_whom_they_are_meant_for_in_their_order(self, pool: Any) -> None:
        ours, _ = pool
        ids = np.array([5, 0, 3])
        ours.set_attr("factor", [5.0, 10.0, 3.0], ids)
        assert ours.call("factor", (), {}, np.arange(6))(None) == [10.0, 1.0, 1.0, 3.0, 1.0, 5.0]
        assert ours.call("scaled", (2.0,), {"by": 2.0}, ids)(None) == [20.0, 40.0, 12.0]
        ours.set_attr("factor", [1.0] * 6, np.arange(6))


def test_infos_name_environments_by_their_global_index(make_pool: MakePool) -> None:
    pool = make_pool([CountingEnv] * 4)
    ids = np.array([3, 0, 2])
    pool.reset(ids, [3, 0, 2])
    batch = pool.recv(ids)
    assert batch.obs[:, 0].tolist() == [3, 0, 2]
    assert [info.env_id for info in batch.info] == [3, 0, 2]
    pool.close()


@pytest.mark.slow
def test_a_fast_node_is_not_held_up_by_a_slow_one(make_pool: MakePool) -> None:
    pool = make_pool([partial(TimedEnv, 0.0), partial(TimedEnv, 1.5)], loose=True)
    pool.reset(np.arange(2), [0, 1])
    pool.recv(np.arange(2))
    pool.send(np.arange(2), np.zeros(2, int), Autoreset.SAME_STEP)
    assert within(DEADLINE_S, partial(pool.recv, min_completed=1)).env_ids.tolist() == [0]
    for _ in range(5):
        pool.send(np.arange(1), np.zeros(1, int), Autoreset.SAME_STEP)
        assert within(DEADLINE_S, partial(pool.recv, min_completed=1)).env_ids.tolist() == [0]
    with pytest.raises(TimeoutError):
        pool.recv(min_completed=1, timeout_s=0.01)
    assert within(DEADLINE_S, pool.recv).env_ids.tolist() == [1]
    pool.close()


def test_strangers_do_not_disturb_a_run(make_pool: MakePool, tmp_path: Path, caplog: Any) -> None:
    """They find the port of the second node's stream while it is in use."""

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "owned"), "w")

    fns = env_fns(4, ALL_SPACES["dict"], ALL_SPACES["dict"])
    pool = make_pool(fns)
    address, port = stream_of(pool)
    strangers = []
    with closing(SerialPool(factory(fns))) as serial:
        for data in (b"", b"\x80" * 100, pickle.dumps(Evil()), bytes(32) + b"x" * 32):
            sock = socket.create_connection((address, port), DEADLINE_S)
            with suppress(OSError):
                sock.sendall(data)
            strangers.append(sock)
            pools_in_lockstep(pool, serial, ALL_SPACES["dict"], Autoreset.SAME_STEP, num_steps=3)
    for sock in strangers:
        sock.close()
    assert not (tmp_path / "owned").exists()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
    pool.close()


def stream_of(pool: RayPool) -> tuple[str, int]:
    """Finds where the stream goes, as somebody else on the machine would: by looking at its sockets."""
    node = pool.topology.nodes[1]
    actor = pool.worker_pids()[node.name][0]
    inodes = set()
    for entry in Path(f"/proc/{actor}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(entry.readlink()))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        host, port = fields[1].split(":")
        listening, inode = fields[3] == "0A", f"socket:[{fields[9]}]"
        ip = ".".join(str(byte) for byte in reversed(bytes.fromhex(host)))
        if listening and inode in inodes and ip == node.address:
            with suppress(OSError), socket.create_connection((ip, int(port, 16)), 2.0) as sock:
                sock.settimeout(2.0)
                if len(sock.recv(64)) == 32:  # only ours begins with a nonce
                    return ip, int(port, 16)
    raise AssertionError("the second node does not listen on its own address")


def test_close_may_be_repeated_and_ends_everything(make_pool: MakePool) -> None:
    pool = make_pool([CountingEnv] * 4, 2)
    pids = [pid for node in pool.worker_pids().values() for pid in node]
    assert len(pids) == 6
    pool.close()
    pool.close()

    def ended() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    deadline = time.monotonic() + DEADLINE_S
    while not ended():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_topology_that_names_no_node_is_not_waited_for(ray_cluster: object) -> None:
    topology = plan_topology([FreeNode("0" * 56, "10.9.9.9", 1)], 1)
    with pytest.raises(NodeLostError, match=r"10\.9\.9\.9"):
        within(DEADLINE_S, lambda: NodeSupervisor(factory([CountingEnv]), topology))


class TestAStreamThatCanNotBeConnected:
    @pytest.fixture
    def refused_once(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The first connection to a node goes to a port on which nothing listens; the ports that were meant."""
        ports: list[int] = []

        def connect_elsewhere(address: str, port: int, key: bytes) -> FrameSocket:
            ports.append(port)
            return connect(address, port if len(ports) > 1 else 1, key)

        monkeypatch.setattr(remote_node, "connect", connect_elsewhere)
        return ports

    def test_another_node_is_tried(self, make_vec: Any, refused_once: list[int]) -> None:
        env = make_vec([CountingEnv] * 4, nodes=2)
        assert refused_once and env.transports == ("shm", "shm")
        env.reset(seed=0)
        env.step(np.zeros(4, np.int64))

    def test_it_is_a_lost_node(self, make_vec: Any, refused_once: list[int]) -> None:
        with pytest.raises(NodeLostError, match="firewall") as caught:
            make_vec([CountingEnv] * 4, nodes=2, on_node_loss="raise")
        assert f":{refused_once[0]}" in str(caught.value)


def test_an_answer_taken_in_part_gives_no_stale_row() -> None:
    """Environment 1 has answered again since the answer of both, of which environment 0 was not taken."""
    node = remote_node.RemoteNode.__new__(remote_node.RemoteNode)
    node.slice = NodeSlice("n", "127.0.0.1", (0, 2), 2)
    node._newest = None

    def answer(ids: list[int], step: float) -> StepBatch:
        flags = np.zeros(len(ids), bool)
        return StepBatch(np.array(ids), np.full((len(ids), 1), step), np.full(len(ids), step), flags, flags, ())

    both, again = answer([0, 1], 1.0), answer([1], 2.0)
    node._answers = {0: (both, 0), 1: (again, 0)}
    batch = node.take(np.array([0, 1]))
    assert batch.obs[:, 0].tolist() == batch.rew.tolist() == [1.0, 2.0] and node._answers == {}


def test_ctrl_c_while_it_closes_leaves_no_worker(make_pool: MakePool) -> None:
    pool = make_pool([partial(InterruptsItsClose, os.getpid()), CountingEnv])
    pids = [pid for _, *workers in pool.worker_pids().values() for pid in workers]
    assert len(pids) == 2
    with pytest.raises(KeyboardInterrupt):
        pool.close(300.0)
    pool.close(0.0)
    wait_until(lambda: not any(map(alive, pids)), "the workers have ended")


@pytest.mark.usefixtures("ray_cluster")
def test_ctrl_c_in_a_chunk_that_this_process_takes_closes_all_since_half_of_it_is_lost() -> None:
    class Interrupts:
        noise = NO_NOISE
        num_acts = 0

        def act(self, obs: Any, noise: Any) -> Any:
            self.num_acts += 1
            if self.num_acts == 3:
                raise KeyboardInterrupt
            return np.zeros(len(obs), int), {}

    env = RayVecEnv([CountingEnv] * 2, num_nodes=1, workers_per_node=1)
    collector = Collector(env, Interrupts(), inference="node", seed=1)
    with pytest.raises(KeyboardInterrupt):
        collector.collect(n_step=20)
    assert env.closed


def test_a_policy_that_can_not_be_loaded_is_not_loaded_on_a_replacement_node_either(make_pool: MakePool) -> None:
    pool = make_pool([CountingEnv] * 2)
    with pytest.raises(pickle.UnpicklingError):
        pool.acting.load(1, b"no pickle")
    for member in pool._nodes:
        pool.acting.install(member.node)
    pool.close()
