"""Hosts on one machine: each has its own network, processes, host name and /dev/shm, and a cable to a common switch.

A host is a set of Linux namespaces that the kernel removes when the host's first process ends. That process reads from
a pipe, and ends when the process that made the host closes the pipe or dies. Nothing has a name outside, so hosts of
several programs do not see each other, and none of them can be left behind.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayvec.errors import RayvecError

DEADLINE_S = 180.0  # Ray starts in 5 s on a quiet machine
_PREFIX = "10.77"
_SWITCH = f"{_PREFIX}.255.254"
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_PORT = 6379


@functools.cache
def why_not() -> str:
    """Returns why this machine can't make hosts, or an empty string."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs the programs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    try:
        with Network(1) as network:
            network.hosts[0].run("true")
    except (RayvecError, OSError, IndexError, subprocess.TimeoutExpired) as error:
        return f"needs network and process namespaces: {error}".strip()
    return ""


class _Namespaces:
    """Namespaces that exist as long as their first process."""

    def __init__(self, *flags: str, setup: str) -> None:
        script = f"{setup} && echo ready && exec env --ignore-signal=CHLD cat"  # so that no zombies stay
        self._holder = subprocess.Popen(
            ["unshare", *flags, "--fork", "--kill-child", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that made them
        )
        self.pid = str(self._holder.pid)  # `--kill-child` ends the first process with this one
        try:
            assert self._holder.stdout is not None
            if self._holder.stdout.readline() != "ready\n":
                raise RayvecError(self._holder.communicate()[1])
            self.pid = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0]
        except BaseException:
            self.end()
            raise

    def ip(self, *arguments: str) -> None:
        """Runs ``ip`` in the network of the namespaces."""
        command = ["nsenter", "-t", self.pid, "-n", "ip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RayvecError(f"ip {' '.join(arguments)}: {done.stderr}")

    def end(self) -> None:
        """Ends the first process, and with it all others and the namespaces."""
        if self._holder.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.pid), signal.SIGKILL)  # a child of this process can hold the pipe open
        self._holder.communicate(timeout=DEADLINE_S)


class Host:
    """A host; made by :class:`Network`. `cable` is the name of its link at the switch."""

    def __init__(self, number: int, switch: _Namespaces, environment: dict[str, str]) -> None:
        self.name, self.address = f"h{number}", f"{_PREFIX}.{number // 250}.{number % 250 + 1}"
        self.environment = dict(environment)
        self.switch, self.cable = switch, f"v{number}"
        setup = f"hostname {self.name} && mount -t tmpfs -o size=256m tmpfs /dev/shm && ip link set lo up"
        self.space = _Namespaces("--net", "--pid", "--mount", "--mount-proc", "--uts", setup=setup)
        try:
            self._connect()
        except BaseException:
            self.end()
            raise

    def _connect(self) -> None:
        self.switch.ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.space.pid)
        self.switch.ip("link", "set", self.cable, "master", "switch", "up")
        self.space.ip("address", "add", f"{self.address}/16", "dev", "eth0")
        self.space.ip("link", "set", "eth0", "up")
        self.space.ip("route", "add", "default", "via", _SWITCH)  # by which Ray finds its own address

    @property
    def enter(self) -> list[str]:
        """Words before a command that runs it on the host."""
        return ["nsenter", "-t", self.space.pid, "-n", "-m", "-p", "-u"]

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a process on the host, as leader of its own group, without variables of another cluster."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return subprocess.Popen(
            [*self.enter, *command],
            env={**variables, **self.environment},
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host and waits until it exits with 0. Daemons that it has started keep running."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.popen(*command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **options)
            try:
                code = process.wait(DEADLINE_S)
            except BaseException:
                kill_group(process)
                raise
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess([*command], code, out.read(), err.read())
        if code != 0:
            raise RayvecError(f"{' '.join(command)} on {self.name}: exit code {code}\n{done.stderr}")
        return done

    def end(self) -> None:
        """Ends the host and all of its processes at once, as a power cut does."""
        self.space.end()


class Network(contextlib.AbstractContextManager["Network"]):
    """A switch and hosts, with variables for the environment of all their processes."""

    def __init__(self, num_hosts: int = 0, environment: dict[str, str] | None = None) -> None:
        self.environment = dict(environment or {})
        self.hosts: list[Host] = []
        self._numbers = itertools.count()
        address = f"ip address add {_SWITCH}/16 dev switch"
        setup = f"ip link add switch type bridge && ip link set switch up && {address}"
        self._switch = _Namespaces("--net", setup=setup)
        try:
            for _ in range(num_hosts):
                self.add()
        except BaseException:
            self.close()
            raise

    def add(self) -> Host:
        """Adds a host."""
        self.hosts.append(Host(next(self._numbers), self._switch, self.environment))
        return self.hosts[-1]

    def close(self) -> None:
        """Ends all hosts and the switch."""
        with contextlib.ExitStack() as stack:  # also the others if one raises
            for end in (self._switch.end, *(host.end for host in reversed(self.hosts))):
                stack.callback(end)

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Cluster:
    """A Ray cluster with a token, whose head is the first host of a network; its hosts have so many cores in Ray."""

    def __init__(self, network: Network, directory: Path, cpus: int = 2) -> None:
        self.network, self._directory, self._cpus = network, directory, cpus
        self.address = f"{network.hosts[0].address}:{_PORT}"
        network.environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": self.address,
            "RAY_worker_niceness": "0",
        }
        for host in network.hosts:
            self.join(host)

    @property
    def head(self) -> Host:
        """The host of the head, on which drivers run."""
        return self.network.hosts[0]

    def join(self, host: Host) -> None:
        """Starts Ray on a host; one after another, since raylets that start together can fail."""
        host.environment = {**self.network.environment, **host.environment}
        is_head = host is self.head
        where = ["--head", f"--port={_PORT}", "--include-dashboard=false"] if is_head else [f"--address={self.address}"]
        ports = ["--node-manager-port=6400", "--object-manager-port=6401"]
        directory = self._directory / f"{host.name}-{secrets.token_hex(2)}"
        directory.mkdir()
        sizes = [f"--num-cpus={self._cpus}", f"--object-store-memory={76 << 20}", "--memory=2000000000"]
        places = [f"--node-ip-address={host.address}", f"--temp-dir={directory}", "--disable-usage-stats"]
        host.run(*_RAY, "start", *where, *ports, *sizes, *places)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kills a process that leads a group, and the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait(DEADLINE_S)


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


def cut_off(cluster: Cluster, host: Host) -> None:
    """Ends a host like a machine without power: it sends nothing more, not even that it ends."""
    unplug(host)
    host.end()
    cluster.network.hosts.remove(host)


def remove(cluster: Cluster, host: Host) -> None:
    """Cuts a host off, and waits until Ray knows it: else it would place something there."""
    cut_off(cluster, host)
    python(cluster.head, AWAIT_END, host.address)


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
