"""A cluster whose hosts are hosts: each has its own network, processes and memory, and Ray asks for a token.

The tests share one cluster, and Ray has its own settings: after a minute it notices that a host is gone. The last tests
end hosts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.hosts import (
    Cluster,
    Host,
    Program,
    Record,
    block,
    cluster_of,
    cut_off,
    long,
    on_hosts,
    others,
    plug,
    python,
    remove,
    unblock,
    unplug,
)
from helpers.training_kit import lines_of

PROGRAMS = Path(__file__).with_name("programs.py")
pytestmark = on_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Three hosts with four cores each in Ray."""
    with cluster_of(3, cpus=4) as cluster:
        yield cluster


@pytest.fixture
def cluster(hosts: Cluster) -> Cluster:
    """The three hosts; those that a test before has ended are replaced."""
    while len(hosts.network.hosts) < 3:
        hosts.join(hosts.network.add())
    return hosts


IS_ALIVE = """
import json, sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init("auto", log_to_driver=False, logging_level="ERROR")
ids = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == sys.argv[1]]
try:
    here = NodeAffinitySchedulingStrategy(ids[0], soft=False)
    ray.get(ray.remote(num_cpus=0)(lambda: 0).options(scheduling_strategy=here).remote())
    print(json.dumps(True))
except (IndexError, ray.exceptions.RayError):  # Ray does not list the host, or lost it
    print(json.dumps(False))
"""


@contextlib.contextmanager
def unplugged(cluster: Cluster, host: Host) -> Iterator[float]:
    """Pulls the cable of a host; yields when. Replaces the host if Ray gives it up before it is plugged in again."""
    began_s = time.monotonic()
    unplug(host)
    try:
        yield began_s
    finally:
        plug(host)
        if not python(cluster.head, IS_ALIVE, host.address):
            remove(cluster, host)
            cluster.join(cluster.network.add())


@contextlib.contextmanager
def blocked(host: Host) -> Iterator[float]:
    """Drops what other hosts send to the ports of a host's streams; yields since when."""
    began_s = time.monotonic()
    block(host)
    try:
        yield began_s
    finally:
        unblock(host)


def until_moved(program: Program, lost: Host) -> Any:
    """Returns the first line of a program that uses a host no more."""
    line = program.line()
    while lost.address in line.get("hosts", [lost.address]):
        line = program.line()
    return line


def test_hosts_compute_what_one_process_does(cluster: Cluster) -> None:
    """Steps, chunks, and steps by Tianshou's adapter."""
    with Program(cluster.head, PROGRAMS, "equal") as program:
        line = program.line()
        assert line["steps"] == 200 and line["hosts"] == sorted(host.address for host in cluster.network.hosts)
        assert program.line()["errors"] == []
        assert program.line()["tianshou_steps"] == 50


def test_links_that_fail_under_a_driver_that_steps(cluster: Cluster, record: Record) -> None:
    """A link that is down for 3 s, a connection that is open on one side only, and a link that stays down.

    TCP sends again what got lost in the first case. In the others the environments move; Ray has noticed nothing.
    """
    first, second = others(cluster)
    with Program(cluster.head, PROGRAMS, "go_on", "rehost", "3") as program:
        program.until(restarted=[])
        unplug(first)
        time.sleep(3.0)  # the fault itself: a link that is down for so long
        began_s = time.monotonic()
        plug(first)
        while (line := program.line())["at_s"] < began_s:
            pass
        assert line["restarted"] == []
        record("link down for 3 s: stepping resumes after the link", line["at_s"] - began_s)
        with blocked(first) as began_s:  # the node no longer gets what the driver sends, and neither side is told
            line = until_moved(program, first)
            assert first.address in line["alive"]
            record("half-open connection: stepping resumes", line["at_s"] - began_s)
        with unplugged(cluster, second) as began_s:
            line = until_moved(program, second)
            assert second.address in line["alive"]
            record("link down: stepping resumes", line["at_s"] - began_s)


@long
def test_a_link_that_goes_down_in_decentralized_training_costs_a_rank(
    cluster: Cluster, tmp_path: Path, record: Record
) -> None:
    """The run continues from its last checkpoint with the ranks that have room on the hosts that are left."""
    metrics, lost = tmp_path / "run" / "metrics.jsonl", others(cluster)[0]
    with Program(cluster.head, PROGRAMS, "train", str(metrics.parent), "3") as program:
        program.wait_until(lambda: lines_of(metrics) > 20)
        began_s = time.monotonic()
        unplug(lost)
        program.wait_until(lambda: "restarting all ranks" in program.log)
        record("link down in a decentralized training: noticed", time.monotonic() - began_s)
        before = lines_of(metrics)
        program.wait_until(lambda: lines_of(metrics) > before)
        record("link down in a decentralized training: training resumes", time.monotonic() - began_s)
    cut_off(cluster, lost)


@long
def test_a_head_whose_machine_is_gone_ends_a_driver_that_asks_often(record: Record) -> None:
    """With Ray's own timeout it takes longer than the three minutes that are waited for."""
    with cluster_of(3, cpus=4) as cluster:
        with Program(others(cluster)[0], PROGRAMS, "go_on", "raise", "3") as program:
            program.until(restarted=[])
            began_s = time.monotonic()
            cut_off(cluster, cluster.head)
            assert program.process.wait(180) == 1
            record("head gone: end of the driver", time.monotonic() - began_s)
