"""Faults of hosts on one machine (:mod:`helpers.network`), programs on them, and which tests need such hosts."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.network import DEADLINE_S, Cluster, Host, Network, kill_group, why_not

on_hosts = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=f"hosts in namespaces: {why_not()}"),
]
"""Marks of a module whose tests need hosts."""

long = pytest.mark.skipif("RAYVEC_TEST_HOSTS" not in os.environ, reason="takes minutes: make test-hosts")
"""Marks what `make test-all` leaves to `make test-hosts`."""


EPHEMERAL = (32768, 60999)
AWAIT_END = """
import sys, time, ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
while sys.argv[1] in [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]:
    time.sleep(0.2)
print("{}")
"""


@contextlib.contextmanager
def cluster_of(num_hosts: int, cpus: int = 2) -> Iterator[Cluster]:
    """Yields a Ray cluster on so many hosts, and removes all of it."""
    with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as directory:
        with Network(num_hosts) as network:
            yield Cluster(network, Path(directory), cpus)


def others(cluster: Cluster) -> list[Host]:
    """Returns the hosts of a cluster that are not its head."""
    return cluster.network.hosts[1:]


def await_end(cluster: Cluster, host: Host) -> None:
    """Waits until Ray knows that a host is gone."""
    python(cluster.head, AWAIT_END, host.address)


def cut_off(cluster: Cluster, host: Host) -> None:
    """Ends a host like a machine without power: it sends nothing more, not even that it ends."""
    unplug(host)
    host.end()
    cluster.network.hosts.remove(host)


def remove(cluster: Cluster, host: Host) -> None:
    """Cuts a host off, and waits until Ray knows it: else it would place something there."""
    cut_off(cluster, host)
    await_end(cluster, host)


def unplug(host: Host) -> None:
    """Pulls the cable: packets are lost without a notice."""
    host.switch.ip("link", "set", host.cable, "down")


def plug(host: Host) -> None:
    """Plugs the cable in again."""
    host.switch.ip("link", "set", host.cable, "up")


def block(host: Host) -> None:
    """Drops what other hosts send to the ports of streams, as a firewall would. Ray has fixed ports below them."""
    both = "-".join(map(str, EPHEMERAL))
    ports = ("ipproto", "tcp", "sport", both, "dport", both)
    host.space.ip("rule", "add", "pref", "100", "lookup", "local")  # the kernel's own rule would come first
    host.space.ip("rule", "del", "pref", "0")
    host.space.ip("rule", "add", "pref", "50", "iif", "eth0", *ports, "blackhole")


def unblock(host: Host) -> None:
    """Ends what `block` does."""
    host.space.ip("rule", "del", "pref", "50")
    host.space.ip("rule", "add", "pref", "0", "lookup", "local")
    host.space.ip("rule", "del", "pref", "100")


def python(host: Host, code: str, *arguments: str) -> Any:
    """Runs Python code on a host; returns the last line that it prints, as JSON."""
    return json.loads(host.run(sys.executable, "-c", code, *arguments).stdout.splitlines()[-1])


class Program:
    """A Python program that runs on a host and prints lines of JSON."""

    def __init__(self, host: Host, path: Path, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": self._errors}
        self.process = host.popen(sys.executable, str(path), *arguments, **streams)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):  # Ray prints too
                    self._lines.put(line)
        self._lines.put(None)

    @property
    def log(self) -> str:
        """What the program has written to standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def line(self, limit_s: float = DEADLINE_S) -> Any:
        """Returns the next line; fails if none comes in time or the program has ended."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            line = None
        assert line is not None, f"no line within {limit_s:g} s, exit code {self.process.poll()}:\n{self.log[-4000:]}"
        return json.loads(line)

    def until(self, limit_s: float = DEADLINE_S, **wanted: Any) -> Any:
        """Returns the next line that has these values; skips others."""
        deadline_s = time.monotonic() + limit_s
        while True:
            line = self.line(max(0.0, deadline_s - time.monotonic()))
            if wanted.items() <= line.items():
                return line

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`; fails if the program ends before, or if it takes too long."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log[-4000:]
            time.sleep(0.05)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        kill_group(self.process)
        self._reader.join()
        self._errors.close()


Record = Callable[[str, float], None]


def until_error(program: Program) -> Any:
    """Returns the line with the error that ends a program."""
    line = program.line()
    while "error" not in line:
        line = program.line()
    return line
