"""Nodes on Ray: actors, claims of cores, bundles of placement groups, who answers, and who knows which secret."""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.testing import CountingEnv
from helpers.waiting import DEADLINE_S, alive, wait_until
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import rayvec
from rayvec.cluster import remote, stream
from rayvec.cluster.node_facts import check_versions, own_versions
from rayvec.cluster.nodes import unreachable
from rayvec.cluster.stream import connect
from rayvec.env_server import dial
from rayvec.errors import ConfigError, NodeLostError
from rayvec.vector.ray_vec_env import RayVecEnv


class Closes(CountingEnv):
    """Leaves a file when it has closed, which takes a second, or does not end."""

    hangs = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def close(self) -> None:
        time.sleep(600 if self.hangs else 1)
        (self._folder / "closed").touch()

    def folder(self) -> str:
        """Returns the folder of the fork servers of the node, which workers know too."""
        return get_temp_dir()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_node_that_is_closed_leaves_no_folder(ray_cluster: object, tmp_path: Path, hangs: bool) -> None:
    with RayVecEnv([partial(Closes, tmp_path)] * 2, num_nodes=2, workers_per_node=1) as env:
        here, there = env.call("folder")
        assert here == get_temp_dir() and Path(there).exists()
        env.set_attr("hangs", [False, hangs])
        env.close(timeout=3.0 if hangs else DEADLINE_S)
    assert Path(here).exists() and not Path(there).exists()


@pytest.mark.slow
def test_what_hangs_is_killed_where_a_stream_breaks_of_an_idle_driver(
    ray_cluster: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[socket.socket] = []

    def noted(address: tuple[str, int], key: bytes) -> socket.socket:
        dialled.append(dial(address, key))
        return dialled[-1]

    monkeypatch.setattr(stream, "dial", noted)
    with RayVecEnv([partial(Closes, tmp_path)] * 2, num_nodes=2, workers_per_node=1) as env:
        env.set_attr("hangs", [False, True])
        _, worker = env.worker_pids()[env.topology.nodes[1].name]
        dialled[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dialled[0].close()  # by a reset
        wait_until(lambda: not alive(worker), "the worker is killed")


@pytest.mark.slow
def test_other_nodes_close_while_that_of_the_driver_does(ray_cluster: object, tmp_path: Path) -> None:
    """Also where the node of the driver, which has fewer free cores, is not the first."""
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    group = placement_group([{"CPU": 23}], bundle_label_selector=[here])
    assert group.wait(DEADLINE_S)
    try:
        env = RayVecEnv([partial(Closes, tmp_path)] * 2, num_nodes=2, cores_per_env=1)
        assert env.transports == ("tcp", "shm")
        env.set_attr("hangs", [False, True])
        env.close(timeout=6.0)
    finally:
        remove_placement_group(group)
    assert (tmp_path / "closed").exists()


def test_workers_use_the_bundles_of_a_placement_group(ray_cluster: object) -> None:
    """As in a trial of Ray Tune: the first bundle is that of the trial, the others are for its workers."""

    def trial() -> Any:
        with RayVecEnv([CountingEnv] * 4, probe=False) as env:
            env.reset(seed=0)
            steps = env.step(np.zeros(4, int))[0][:, 3].tolist()
            return sum(node.num_workers for node in env.topology.nodes), steps

    group = placement_group([{"CPU": 1}, *[{"CPU": 1}] * 2], strategy="PACK")
    assert group.wait(DEADLINE_S)
    try:
        strategy: Any = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
        task: Any = ray.remote(num_cpus=1, scheduling_strategy=strategy)(trial)
        num_workers, steps = ray.get(task.remote())
    finally:
        remove_placement_group(group)
    assert num_workers == 2 and steps == [1] * 4


@pytest.mark.parametrize("num_refused", [1, 9])
def test_a_stream_that_can_not_be_connected(
    ray_cluster: object, monkeypatch: pytest.MonkeyPatch, num_refused: int
) -> None:
    ports: list[int] = []

    def connect_elsewhere(address: str, port: int, key: bytes) -> Any:
        ports.append(port)
        return connect(address, port if len(ports) > num_refused else 1, key)

    monkeypatch.setattr(remote, "connect", connect_elsewhere)
    if num_refused == 1:
        RayVecEnv([CountingEnv] * 4, num_nodes=2, workers_per_node=1).close()
    else:
        with pytest.raises(NodeLostError, match="firewall") as caught:
            RayVecEnv([CountingEnv] * 4, num_nodes=2, workers_per_node=1)
        assert f":{ports[-1]}" in str(caught.value)
    assert len(ports) == min(num_refused + 1, 3)


class Trial:
    """Has environments within an actor, as a search does."""

    def open(self) -> None:
        self._env = RayVecEnv([CountingEnv], num_nodes=1, workers_per_node=1)


def free_cores() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_cores_claimed_within_an_actor_that_is_killed(ray_cluster: object) -> None:
    """The job goes on, as that of a search does whose trial has ended."""
    before = ray.cluster_resources()["CPU"]
    wait_until(lambda: free_cores() == before, "tests before have closed their environments")
    kind: Any = ray.remote(Trial)
    trial = kind.options(num_cpus=0).remote()
    ray.get(trial.open.remote())
    wait_until(lambda: free_cores() == before - 1, "the core is claimed")
    ray.kill(trial)
    wait_until(lambda: free_cores() == before, "the core is free")


@pytest.mark.parametrize(("package", "version"), [("rayvec", "0.0.9"), ("python", "3.9.1"), ("numpy", "1.26.4")])
def test_a_node_whose_versions_differ_is_refused(package: str, version: str) -> None:
    check_versions(own_versions(), "10.0.0.2")
    with pytest.raises(ConfigError, match=rf"10.0.0.2 has {package} {version}, .*{package} {own_versions()[package]}"):
        check_versions({**own_versions(), package: version}, "10.0.0.2")


def test_a_node_answers_if_it_accepts_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not gets less time to answer until it does."""
    connect, timeouts_s = socket.create_connection, dict[int, list[float]]()

    def noted(address: tuple[str, int], timeout_s: float) -> socket.socket:
        timeouts_s.setdefault(address[1], []).append(timeout_s)
        return connect(address, timeout_s)

    monkeypatch.setattr(socket, "create_connection", noted)
    with ExitStack() as stack:
        busy, full, closed = (socket.create_server(("127.0.0.1", 0), backlog=backlog) for backlog in (9, 0, 9))
        stack.enter_context(busy)  # accepts nothing, but its machine does
        stack.enter_context(full)  # drops what arrives, as a machine does that is gone
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        addresses = {"busy": busy.getsockname(), "silent": full.getsockname(), "refuses": closed.getsockname()}
        closed.close()
        for _ in range(2):
            assert unreachable(addresses) == {"refuses", "silent"}
        assert timeouts_s[addresses["silent"][1]] == [2.0, 0.1] and timeouts_s[addresses["busy"][1]] == [2.0, 2.0]
    assert unreachable({}) == set()


class ShowsEnvironment(CountingEnv):
    """Shows the environment variables of its worker."""

    @property
    def variables(self) -> dict[str, str]:
        return dict(os.environ)


def test_workers_do_not_get_the_token_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("OF_THE_USER", "kept")
    with rayvec.RayVecEnv([ShowsEnvironment] * 2, num_nodes=0, workers_per_node=1) as env:
        for variables in env.get_attr("variables"):
            assert "RAY_AUTH_TOKEN" not in variables and variables["OF_THE_USER"] == "kept"
        (pids,) = env.worker_pids().values()
        for pid in pids:
            assert b"0123456789abcdef" not in Path(f"/proc/{pid}/environ").read_bytes()
