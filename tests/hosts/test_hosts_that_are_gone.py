"""A host that is gone, with health checks of 24 s, and a head that is gone, with Ray's own settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.hosts import Program, Record, cluster_of, cut_off, long, on_hosts, others, python, until_error
from helpers.network import Cluster
from helpers.training_kit import lines_of
from helpers.waiting import wait_until

PROGRAMS = Path(__file__).with_name("programs.py")
pytestmark = on_hosts


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three hosts with four cores each in Ray."""
    with cluster_of(3, cpus=4) as cluster:
        yield cluster


ACTORS = """
import json, psutil
commands = [(process.info["cmdline"] or [""])[0] for process in psutil.process_iter(["cmdline"])]
print(json.dumps(sum(command.startswith("ray::NodeActor") for command in commands)))
"""


@long
def test_a_host_that_is_gone_is_an_error_for_others_and_the_end_of_its_own_driver_s_actors(
    cluster: Cluster, record: Record
) -> None:
    lost = others(cluster)[1]
    left = [host for host in cluster.network.hosts if host is not lost]
    with (
        Program(cluster.head, PROGRAMS, "go_on", "raise", "3") as uses,
        Program(lost, PROGRAMS, "go_on", "raise", "3") as drives,
    ):
        uses.until(restarted=[]), drives.until(restarted=[])
        assert all(python(host, ACTORS) for host in left)
        began_s = time.monotonic()
        cut_off(cluster, lost)
        line = until_error(uses)
        assert lost.address in line["error"]
        record("host gone: NodeLostError", line["at_s"] - began_s)
        wait_until(lambda: not any(python(host, ACTORS) for host in left))
        record("the driver's host gone: its actors on other hosts have ended", time.monotonic() - began_s)


@long
def test_a_head_that_is_gone_is_a_clear_error(record: Record, tmp_path: Path) -> None:
    """For a driver on another host, while it steps and while decentralized ranks train; then its process ends."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    for arguments in (("go_on", "raise", "3"), ("train", str(metrics.parent), "2")):
        with cluster_of(int(arguments[-1]), cpus=4, quick=False) as cluster:
            head = cluster.head
            with Program(others(cluster)[0], PROGRAMS, *arguments) as program:
                if arguments[0] == "go_on":
                    program.until(restarted=[])
                else:
                    program.wait_until(lambda: lines_of(metrics) > 5)
                began_s = time.monotonic()
                cut_off(cluster, head)
                line = until_error(program)
                record(f"head gone, {arguments[0]}: error", line["at_s"] - began_s)
                assert program.process.wait(60) == 1
                assert head.address in line["error"]
