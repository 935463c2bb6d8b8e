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
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayvec.errors import RayvecError

__all__ = ["DEADLINE_S", "Cluster", "Host", "Network", "cluster_of", "kill_group", "why_not", "without_ray"]

DEADLINE_S = 180.0  # Ray starts in 5 s on a quiet machine
_PREFIX = "10.77"
_SWITCH = f"{_PREFIX}.255.254"
_EPHEMERAL = (32768, 60999)
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_PORT = 6379
_AWAIT_END = """
import sys, time, ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
while sys.argv[1] in [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]:
    time.sleep(0.2)
print("{}")
"""


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
    """A host; made by :class:`Network`.

    Attributes:
        name: Its host name.
        address: Its IP address.
        environment: What its processes have in their environment besides that of this process.
    """

    def __init__(self, number: int, switch: _Namespaces, environment: dict[str, str], shm_mib: int = 256) -> None:
        self.name, self.address = f"h{number}", f"{_PREFIX}.{number // 250}.{number % 250 + 1}"
        self.environment = dict(environment)
        self._switch, self._cable, self._is_blocked = switch, f"v{number}", False
        setup = f"hostname {self.name} && mount -t tmpfs -o size={shm_mib}m tmpfs /dev/shm && ip link set lo up"
        self._space = _Namespaces("--net", "--pid", "--mount", "--mount-proc", "--uts", setup=setup)
        try:
            self._connect()
        except BaseException:
            self.end()
            raise

    def _connect(self) -> None:
        self._switch.ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._space.pid)
        self._switch.ip("link", "set", self._cable, "master", "switch", "up")
        self._space.ip("address", "add", f"{self.address}/16", "dev", "eth0")
        self._space.ip("link", "set", "eth0", "up")
        self._space.ip("route", "add", "default", "via", _SWITCH)  # by which Ray finds its own address

    @property
    def pid(self) -> int:
        """The id of its first process."""
        return int(self._space.pid)

    def unplug(self) -> None:
        """Pulls the cable: packets are lost without a notice."""
        self._switch.ip("link", "set", self._cable, "down")

    def plug(self) -> None:
        """Plugs the cable in again."""
        self._switch.ip("link", "set", self._cable, "up")

    def block(self) -> None:
        """Drops what other hosts send to the ports of streams, as a firewall would. Ray has fixed ports below them."""
        both = "-".join(map(str, _EPHEMERAL))
        ports = ("ipproto", "tcp", "sport", both, "dport", both)
        self._space.ip("rule", "add", "pref", "100", "lookup", "local")  # the kernel's own rule would come first
        self._space.ip("rule", "del", "pref", "0")
        self._space.ip("rule", "add", "pref", "50", "iif", "eth0", *ports, "blackhole")
        self._is_blocked = True

    def unblock(self) -> None:
        """Ends what `block` does."""
        if self._is_blocked:
            self._space.ip("rule", "del", "pref", "50")
            self._space.ip("rule", "add", "pref", "0", "lookup", "local")
            self._space.ip("rule", "del", "pref", "100")
            self._is_blocked = False

    def limit(self, cpu_max: str, memory_max: str) -> None:
        """Shows processes the limits of a control group, as those of a container see them. Nothing enforces them."""
        write = f"echo {cpu_max} > cpu.max && echo {memory_max} > memory.max"
        self.run("sh", "-c", f"mount -t tmpfs tmpfs /sys/fs/cgroup && cd /sys/fs/cgroup && {write}")

    @property
    def enter(self) -> list[str]:
        """Words before a command that runs it on the host."""
        return ["nsenter", "-t", self._space.pid, "-n", "-m", "-p", "-u"]

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a process on the host, as leader of its own group."""
        return subprocess.Popen(
            [*self.enter, *command],
            env={**without_ray(), **self.environment, **options.pop("environment", {})},
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *command: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host to its end.

        Raises:
            RayvecError: It failed; not with ``check=False``.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.popen(*command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **options)
            try:
                code = process.wait(DEADLINE_S)
            except BaseException:  # after success, daemons that it has started go on
                kill_group(process)
                raise
            out.seek(0), err.seek(0)
            done = subprocess.CompletedProcess([*command], code, out.read(), err.read())
        if check and code != 0:
            raise RayvecError(f"{' '.join(command)} on {self.name}: exit code {code}\n{done.stderr}")
        return done

    def python(self, code: str, *arguments: str) -> Any:
        """Runs Python code on the host; returns the last line that it prints, as JSON."""
        return json.loads(self.run(sys.executable, "-c", code, *arguments).stdout.splitlines()[-1])

    def end(self) -> None:
        """Ends the host and all of its processes at once, as a power cut does."""
        self._space.end()


class Network:
    """A switch and hosts.

    Args:
        num_hosts: How many.
        environment: What processes of all hosts have in their environment.
    """

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

    def add(self, **options: Any) -> Host:
        """Adds a host."""
        self.hosts.append(Host(next(self._numbers), self._switch, self.environment, **options))
        return self.hosts[-1]

    def close(self) -> None:
        """Ends all hosts and the switch."""
        with contextlib.ExitStack() as stack:  # also the others if one raises
            for end in (self._switch.end, *(host.end for host in reversed(self.hosts))):
                stack.callback(end)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Cluster:
    """A Ray cluster with a token, whose head is the first host of a network.

    Args:
        network: Its hosts. Those that it has join.
        directory: For the files of Ray.
        cpus: Cores that each host has in Ray.
        quick: Whether Ray notices after 24 s that a node is gone, instead of after a minute, as by default.
        store_mib: Memory for Ray's objects on each host.
    """

    def __init__(
        self, network: Network, directory: Path, cpus: int = 2, *, quick: bool = True, store_mib: int = 76
    ) -> None:
        self.network, self._directory, self._cpus, self._store_mib = network, directory, cpus, store_mib
        self.address = f"{network.hosts[0].address}:{_PORT}"
        network.environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": self.address,
            "RAY_worker_niceness": "0",
        }
        if quick:
            checks = {"period_ms": 1000, "timeout_ms": 3000, "failure_threshold": 6}
            network.environment |= {f"RAY_health_check_{name}": str(value) for name, value in checks.items()}
        for host in network.hosts:
            self.join(host)

    @property
    def head(self) -> Host:
        """The host of the head, on which drivers run."""
        return self.network.hosts[0]

    @property
    def others(self) -> list[Host]:
        """The other hosts."""
        return self.network.hosts[1:]

    def join(self, host: Host, *before: str, cpus: int | None = None) -> None:
        """Starts Ray on a host; one after another, since raylets that start together can fail.

        Args:
            host: Which.
            before: Words before the command, such as ``prlimit``.
            cpus: Cores that it has in Ray; by default as many as the others.
        """
        host.environment = {**self.network.environment, **host.environment}
        is_head = host is self.head
        where = ["--head", f"--port={_PORT}", "--include-dashboard=false"] if is_head else [f"--address={self.address}"]
        ports = ["--node-manager-port=6400", "--object-manager-port=6401"]
        directory = self._directory / f"{host.name}-{secrets.token_hex(2)}"
        directory.mkdir()
        cpus = self._cpus if cpus is None else cpus
        sizes = [f"--num-cpus={cpus}", f"--object-store-memory={self._store_mib << 20}", "--memory=2000000000"]
        host.run(
            *before,
            *_RAY,
            "start",
            *where,
            *ports,
            *sizes,
            f"--node-ip-address={host.address}",
            f"--temp-dir={directory}",
            "--disable-usage-stats",
        )

    def await_end(self, host: Host) -> None:
        """Waits until Ray knows that a host is gone."""
        self.head.python(_AWAIT_END, host.address)

    def cut_off(self, host: Host) -> None:
        """Ends a host like a machine without power: it sends nothing more, not even that it ends."""
        host.unplug()
        host.end()
        self.network.hosts.remove(host)

    def remove(self, host: Host) -> None:
        """Cuts a host off, and waits until Ray knows it: else it would place something there."""
        self.cut_off(host)
        self.await_end(host)


@contextlib.contextmanager
def cluster_of(num_hosts: int, **options: Any) -> Iterator[Cluster]:
    """Yields a Ray cluster on so many hosts, and removes all of it."""
    with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as directory:
        with Network(num_hosts) as network:
            yield Cluster(network, Path(directory), **options)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kills a process that leads a group, and the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait(DEADLINE_S)


def without_ray() -> dict[str, str]:
    """Returns the environment of this process without Ray's variables, which are for another cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
