"""A cluster whose hosts are hosts: each has its own network, processes and memory, and Ray asks for a token."""

from __future__ import annotations

import contextlib
import shutil
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
    """Keeps a figure, by default in seconds, in the test report and among what is printed (``-rP``)."""

    def keep(what: str, seconds: float) -> None:
        record_property(what, round(seconds, 1))
        print(f"{what}: {seconds:.1f}")

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
import json, socket, sys, time
kind, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
connect = lambda: socket.create_connection((address, port), 30)
answers, sent = [], 0
if kind == "flood":  # each connection is closed after its handshake; the next one goes on
    block, until_s = bytes(1 << 20), time.monotonic() + 60
    while sent < 10 << 30 and time.monotonic() < until_s:
        try:
            with connect() as sock:
                while True:
                    sent += sock.send(block)
        except OSError:
            pass
else:
    socks = []
    for number in range(int(sys.argv[4])):
        socks.append(connect())
        if kind == "garbage":
            socks[-1].sendall(b"x" * 1000)
    for sock in socks:
        received = b""
        try:
            while data := sock.recv(4096):
                received += data
        except ConnectionResetError:
            pass
        answers.append(len(received))
print(json.dumps({"answers": sorted(set(answers)), "sent": sent}))
"""
USED = """
import json, psutil, sys
process = psutil.Process(int(sys.argv[1]))
times = process.cpu_times()
print(json.dumps([times.user + times.system, process.memory_info().rss, process.num_threads()]))
"""


@pytest.mark.parametrize(
    ("kind", "arguments"), [("garbage", ["100"]), ("silent", ["100"]), ("silent", ["1000"]), ("flood", [])]
)
def test_strangers_on_the_port_of_a_stream_change_nothing(
    cluster: Cluster, record: Record, kind: str, arguments: list[str]
) -> None:
    """Connections from another host: each gets a nonce, at most one answer to what it says, and is closed."""
    with Program(cluster.head, PROGRAMS, "go_on", "raise") as program:
        line = program.line()
        (address, port), pid = line["streams"][0], str(line["pids"][0])
        node = next(host for host in cluster.others if host.address == address)
        other = next(host for host in cluster.others if host.address != address)
        first, (cpu_s, memory, threads) = program.until(restarted=[]), node.python(USED, pid)
        last = program.until(restarted=[])
        while last["at_s"] - first["at_s"] < 3.0:
            last = program.until(restarted=[])
        quiet = (last["step"] - first["step"]) / (last["at_s"] - first["at_s"])
        quiet_cpu = node.python(USED, pid)[0] - cpu_s
        began_s = time.monotonic()
        found = other.python(STRANGERS, kind, address, str(port), *arguments)
        seconds = time.monotonic() - began_s
        assert set(found["answers"]) <= {0, 32, 64}
        while last["at_s"] < began_s:
            first = last = program.until(restarted=[])
        while last["at_s"] < began_s + seconds:
            last = program.until(restarted=[])
        after_s, after_memory, after_threads = node.python(USED, pid)
        assert after_memory - memory < 64 << 20 and after_threads <= threads + 20
        name = f"strangers, {' '.join([kind, *arguments])}"
        record(f"{name}: seconds", seconds)
        record(f"{name}: MiB sent", found["sent"] / 2**20)
        record(f"{name}: MiB that the node's process grew", (after_memory - memory) / 2**20)
        record(f"{name}: steps/s before", quiet)
        record(f"{name}: steps/s meanwhile", (last["step"] - first["step"]) / max(1e-9, last["at_s"] - first["at_s"]))
        record(f"{name}: CPU seconds of the node's process, before", quiet_cpu)
        record(f"{name}: CPU seconds of the node's process, meanwhile and before", after_s - cpu_s)


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


@long
def test_a_connection_that_is_open_on_one_side_only_moves_the_environments(cluster: Cluster, record: Record) -> None:
    """The node no longer gets what the driver sends, and neither side is told."""
    with broken(cluster, 0), Program(cluster.head, PROGRAMS, "go_on", "rehost") as program:
        program.until(restarted=[])
        lost = cluster.others[0]
        began_s = time.monotonic()
        lost.block()
        line = program.line()
        while lost.address in line["hosts"]:
            line = program.line()
        record("half-open connection: stepping resumes", line["at_s"] - began_s)


ACTORS = """
import json, psutil
commands = [(process.cmdline() or [""])[0] for process in psutil.process_iter()]
print(json.dumps(sum(command.startswith("ray::NodeActor") for command in commands)))
"""


@long
def test_a_driver_whose_host_is_gone_leaves_nothing_on_the_others(cluster: Cluster, record: Record) -> None:
    lost = cluster.others[0]
    left = [host for host in cluster.network.hosts if host is not lost]
    with broken(cluster, 0), Program(lost, PROGRAMS, "go_on", "raise") as program:
        program.until(restarted=[])
        assert all(host.python(ACTORS) for host in left)
        began_s = time.monotonic()
        lost.unplug()
        lost.end()
        wait_until(lambda: not any(host.python(ACTORS) for host in left))
        record("the driver's host gone: its actors on other hosts have ended", time.monotonic() - began_s)


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long ahead(void) { return atol(getenv("CLOCK_AHEAD_S")); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += ahead();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return code;
}

time_t time(time_t *kept) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (kept) *kept = exact.tv_sec;
    return exact.tv_sec;
}
"""


@long
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, for a library that shifts a host's clock")
def test_clocks_that_differ_by_ten_minutes_change_nothing(tmp_path: Path) -> None:
    """Steps, chunks, and a decentralized training that resumes, with a host ahead and a host behind."""
    library = tmp_path / "clock.so"
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compiler, input=CLOCK, text=True, check=True)
    with cluster_of(1) as cluster:
        for ahead_s in (600, -600):
            host = cluster.network.add()
            host.environment |= {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(ahead_s)}
            cluster.join(host)
            assert abs(host.python("import time; print(time.time())") - time.time() - ahead_s) < 100
        with Program(cluster.head, PROGRAMS, "steps") as program:
            assert program.line()["steps"] == 200
        with Program(cluster.head, PROGRAMS, "chunks") as program:
            assert program.line()["errors"] == []
        run_dir = tmp_path / "run"
        with Program(cluster.others[0], PROGRAMS, "train", str(run_dir), "1152", "3") as program:
            assert program.line()["steps"] >= 1152
        lengthen(run_dir, 1152, 2304)
        with Program(cluster.others[1], PROGRAMS, "train", str(run_dir), "2304", "3") as program:
            assert program.line()["steps"] >= 2304


@pytest.fixture
def slow_cluster() -> Iterator[Cluster]:
    """Three hosts whose Ray notices after a minute that one is gone, as it does by default."""
    with cluster_of(3, quick=False) as cluster:
        yield cluster


def lines_of(metrics: Path) -> int:
    """Returns how many lines of metrics a run has written."""
    return sum(1 for _ in read_metrics(metrics)) if metrics.exists() else 0


@long
def test_a_link_that_goes_down_is_noticed_before_ray_does(
    slow_cluster: Cluster, tmp_path: Path, record: Record
) -> None:
    """First in a decentralized training, then while chunks are collected; Ray has its own settings."""
    metrics, (first, second) = tmp_path / "run" / "metrics.jsonl", slow_cluster.others
    arguments = ("train", str(metrics.parent), "10000000", "3")
    with Program(slow_cluster.head, PROGRAMS, *arguments) as program:
        program.wait_until(lambda: lines_of(metrics) > 20)
        began_s = time.monotonic()
        first.unplug()
        program.wait_until(lambda: "restarting all ranks" in program.log)
        record("link down in a decentralized training, Ray's own settings: noticed", time.monotonic() - began_s)
        before = lines_of(metrics)
        program.wait_until(lambda: lines_of(metrics) > before)
        record("link down in a decentralized training, Ray's own settings: resumes", time.monotonic() - began_s)
        print(next(line for line in program.log.splitlines() if "restarting all ranks" in line))
    slow_cluster.await_end(first)
    with Program(slow_cluster.head, PROGRAMS, "collect", "2") as program:
        assert len(program.until(restarts=0)["hosts"]) == 2
        began_s = time.monotonic()
        second.unplug()
        line = program.until(errors=[])
        while second.address in line["hosts"]:
            line = program.until(errors=[])
        record("link down while chunks are collected, Ray's own settings: resumes", line["at_s"] - began_s)


@long
def test_a_head_that_is_gone_is_a_clear_error(record: Record, tmp_path: Path) -> None:
    """For a driver on another host, while it steps and while decentralized ranks train."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    for arguments in (("go_on", "raise"), ("train", str(metrics.parent), "10000000", "3")):
        with cluster_of(3, quick=False) as cluster:
            head = cluster.head.address
            with Program(cluster.others[0], PROGRAMS, *arguments) as program:
                if arguments[0] == "go_on":
                    program.until(restarted=[])
                else:
                    program.wait_until(lambda: lines_of(metrics) > 20)
                began_s = time.monotonic()
                cluster.head.unplug()
                cluster.head.end()
                line = program.line()
                while "error" not in line:
                    line = program.line()
                record(f"head gone, {arguments[0]}: error", line["at_s"] - began_s)
                assert head in line["error"] and "Remedy:" in line["error"]
