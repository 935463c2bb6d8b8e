"""A cluster whose hosts are hosts: each has its own network, processes and memory, and Ray asks for a token."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.hosts import Cluster, Program, cluster_of, long, why_not
from helpers.training_kit import lengthen
from helpers.waiting import alive, wait_until

from rayvec.training.loggers import read_metrics

PROGRAMS = Path(__file__).with_name("programs.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=f"hosts in namespaces: {why_not()}"),
]
Record = Callable[[str, float], None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three hosts with two cores each."""
    with cluster_of(3) as cluster:
        yield cluster


@pytest.fixture
def record(record_property: Callable[[str, Any], None]) -> Record:
    """Keeps how long something took, in the test report and among what is printed (``-rP``)."""

    def keep(what: str, seconds: float) -> None:
        record_property(what, round(seconds, 1))
        print(f"{what}: {seconds:.1f} s")

    return keep


@contextlib.contextmanager
def broken(cluster: Cluster, number: int) -> Iterator[None]:
    """Replaces one of the other hosts after a fault."""
    host = cluster.others[number]
    try:
        yield
    finally:
        cluster.replace(host)


def test_steps_are_those_of_sync_vector_env(cluster: Cluster) -> None:
    with Program(cluster.head, PROGRAMS, "steps") as program:
        line = program.line()
    assert line["steps"] == 200 and line["hosts"] == sorted(host.address for host in cluster.network.hosts)


def test_chunks_are_those_of_one_process(cluster: Cluster) -> None:
    with Program(cluster.head, PROGRAMS, "chunks") as program:
        line = program.line()
    assert line["errors"] == []


@long
def test_ppo_trains_with_a_rank_on_each_host_and_resumes_on_fewer(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Program(cluster.head, PROGRAMS, "train", str(run_dir), "1152", "3") as program:
        assert program.line()["steps"] >= 1152
    assert max(line["sent_bytes"] for line in read_metrics(run_dir / "metrics.jsonl")) > 0
    lengthen(run_dir, 1152, 2304)
    with Program(cluster.head, PROGRAMS, "train", str(run_dir), "2304", "2") as program:
        assert program.line()["steps"] >= 2304


def test_a_link_that_goes_down_for_good_moves_the_environments(cluster: Cluster, record: Record) -> None:
    with broken(cluster, 0), Program(cluster.head, PROGRAMS, "go_on", "rehost") as program:
        program.until(restarted=[])
        lost = cluster.others[0]
        began_s = time.monotonic()
        lost.unplug()
        line = program.line()
        while lost.address in line["hosts"]:
            line = program.line()
        record("link down: stepping resumes", line["at_s"] - began_s)


def test_a_link_that_comes_back_in_time_loses_nothing(cluster: Cluster, record: Record) -> None:
    """TCP sends again what got lost while the link was down."""
    with Program(cluster.head, PROGRAMS, "go_on", "raise") as program:
        program.until(restarted=[])
        cluster.others[0].unplug()
        time.sleep(3.0)  # the fault itself: a link that is down for so long
        began_s = time.monotonic()
        cluster.others[0].plug()
        deadline_s = began_s
        while (line := program.line())["at_s"] < deadline_s:
            pass
        assert line["restarted"] == []
        record("link down for 3 s: stepping resumes after the link", line["at_s"] - began_s)


@long
def test_a_host_that_is_gone_is_an_error_that_names_it(cluster: Cluster, record: Record) -> None:
    with broken(cluster, 0), Program(cluster.head, PROGRAMS, "go_on", "raise") as program:
        program.until(restarted=[])
        began_s = time.monotonic()
        cluster.others[0].unplug()  # a machine without power sends nothing more, not even that it ends
        cluster.others[0].end()
        line = program.line()
        while "error" not in line:
            line = program.line()
        assert cluster.others[0].address in line["error"] and "Remedy:" in line["error"]
        record("host gone: NodeLostError", line["at_s"] - began_s)


@long
def test_a_firewall_is_an_error_that_names_address_and_port(cluster: Cluster, record: Record) -> None:
    with broken(cluster, 0):
        cluster.others[0].block()
        with Program(cluster.head, PROGRAMS, "start") as program:
            line = program.line()
        assert f"{cluster.others[0].address}:" in line["error"] and "firewall" in line["error"]
        record("port blocked: NodeLostError", line["seconds"])


STRANGERS = """
import json, socket, sys
answers = []
for number in range(200):
    sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)
    if number % 2:
        sock.sendall(b"x" * 1000)
    answers.append(sock)
for number, sock in enumerate(answers):
    received = b""
    try:
        while data := sock.recv(4096):
            received += data
    except ConnectionResetError:
        pass
    answers[number] = len(received)
print(json.dumps(answers))
"""


def test_strangers_on_the_port_of_a_stream_change_nothing(cluster: Cluster) -> None:
    """200 connections from another host: each gets a nonce, at most one answer to what it says, and is closed."""
    with Program(cluster.head, PROGRAMS, "go_on", "raise") as program:
        address, port = program.line()["streams"][0]
        other = next(host for host in cluster.others if host.address != address)
        assert set(other.python(STRANGERS, address, str(port))) <= {0, 32, 64}
        at_s = time.monotonic()
        line = program.until(restarted=[])
        while line["at_s"] < at_s:
            line = program.until(restarted=[])


def test_hosts_end_with_the_process_that_made_them() -> None:
    """Also if it is killed."""
    code = "from helpers.hosts import Network; import time; n = Network(2)"
    code += "; print(*[each._space.pid for each in n.hosts], flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(map(alive, pids)))


@long
def test_a_link_that_goes_down_in_decentralized_training_costs_a_rank(
    cluster: Cluster, tmp_path: Path, record: Record
) -> None:
    """The run continues from its last checkpoint with the ranks that have room on the hosts that are left."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    count = lambda: sum(1 for _ in read_metrics(metrics))  # noqa: E731
    with broken(cluster, 0), Program(cluster.head, PROGRAMS, "train", str(metrics.parent), "10000000", "3") as program:
        program.wait_until(lambda: metrics.exists() and count() > 20)
        began_s = time.monotonic()
        cluster.others[0].unplug()
        program.wait_until(lambda: "restarting all ranks" in program.log)
        record("link down in a decentralized training: noticed", time.monotonic() - began_s)
        before = count()
        program.wait_until(lambda: count() > before)
        record("link down in a decentralized training: training resumes", time.monotonic() - began_s)
