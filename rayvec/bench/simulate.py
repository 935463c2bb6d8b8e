"""Where benchmarks run: an existing cluster, nodes simulated on this machine, or hosts in network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import psutil

from rayvec.bench.harness.host import MARK
from rayvec.bench.hosts import Cluster, Network, why_not
from rayvec.bench.measured_processes import peer_process
from rayvec.cluster.ray_session import CLUSTER_MARK, end_reaper, start_reaper
from rayvec.errors import ConfigError

__all__ = ["Nodes", "Place", "check_hosts", "check_memory", "nodes", "reachable"]

Place = Literal["simulated", "hosts", "cluster"]
"""What the nodes are: simulated on this machine, hosts in namespaces of this machine, or those of a cluster."""

_PROBE_S = 20.0
_PROBE = """
import json, socket, sys
host, _, port = sys.argv[1].rpartition(":")
if port.isdigit():  # Ray itself would retry for minutes
    socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
import ray
ray.init(sys.argv[1], log_to_driver=False)
print(json.dumps([node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]))
"""
_END_S = 15.0
_NODE_MIB = 260.0
"""Memory of a simulated node's own processes."""
_ENV_MIB = {"rayvec": 14.0, "upper-bound": 9.0, "gymnasium-sync": 1.0, "gymnasium-async": 30.0}
_OTHER_ENV_MIB = 130.0
"""Memory of the process of each environment, by peer; a Ray actor for each takes the most."""
_SHM_MIB, _STORE_MIB = 1024, 512
"""Of a host: the size of /dev/shm, and the part of it that Ray's object store may use."""


class Nodes:
    """The nodes of a benchmark.

    Args:
        address: See the attribute, as for `environment`, `place` and `enter`.
        add: Adds a node of so many cores.
        cpus: Cores of each node of a cluster.

    Attributes:
        address: Of the Ray cluster.
        environment: What a process needs in its environment to connect.
        place: What the nodes are.
        enter: Words before a command that runs it where a driver can connect.
    """

    def __init__(
        self,
        address: str,
        environment: dict[str, str],
        place: Place = "cluster",
        *,
        add: Callable[[int], object] | None = None,
        cpus: Sequence[float] = (),
        enter: Sequence[str] = (),
    ) -> None:
        self.address, self.environment, self.place, self.enter = address, environment, place, enter
        self._add, self._cpus, self._count = add, cpus, 0

    @property
    def share_machine(self) -> bool:
        """Whether all nodes are on this machine, and so share its cores."""
        return self.place != "cluster"

    def check(self, count: int, cores: int) -> None:
        """Refuses more nodes than the cluster has; simulated nodes and hosts are added as needed.

        Raises:
            ConfigError: There are fewer.
        """
        fit = sum(cpus >= cores for cpus in self._cpus)
        if self._add is None and fit < count:
            raise ConfigError(
                "On a cluster, its own nodes are measured.",
                expected=f"{count} nodes of at least {cores} cores",
                got=f"{fit} at {self.address}, whose nodes have {', '.join(f'{n:g}' for n in self._cpus)} cores",
                remedy="Lower --nodes or --cores-per-node, or add nodes to the cluster.",
            )

    def cores(self, count: int, most: int) -> int:
        """Returns how many cores so many nodes have each, up to a number; added ones have as many as that."""
        if self._add is not None:
            return most
        return min(most, int(sorted(self._cpus, reverse=True)[count - 1]))

    def grow(self, count: int, cores: int) -> None:
        """Makes sure that so many nodes of so many cores were added; a real cluster stays as it is."""
        while self._add is not None and self._count < count:
            self._add(cores)
            self._count += 1

    def describe(self, cores: int) -> str:
        """Returns in words what the benchmark runs on."""
        if self.place == "cluster":
            return f"the cluster at {self.address}, {cores} cores of each node"
        kind = "simulated nodes" if self.place == "simulated" else "hosts in network namespaces, nodes"
        return (
            f"{kind} of {cores} cores on this machine ({os.cpu_count()} cores); "
            "the driver has a node of its own, so that each is reached by TCP"
        )


@contextlib.contextmanager
def nodes(address: str | None = None, place: Place = "simulated") -> Iterator[Nodes]:
    """Yields the cluster at an address, or else a private one, to which nodes can be added.

    Args:
        address: Of a cluster.
        place: What is added without one: simulated nodes or hosts.

    Raises:
        ConfigError: No cluster answers at the address, or this machine can't make hosts.
    """
    mark = uuid.uuid4().hex
    if address is not None:
        yield Nodes(address, {MARK: mark}, cpus=reachable(address))
        return
    if place == "hosts":
        check_hosts()
    directory = tempfile.mkdtemp(prefix="rayvec-", dir="/tmp")
    Path(directory, "ray").mkdir()
    reaper = start_reaper(directory)
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": directory,
        "RAY_worker_niceness": "0",
        "RAY_ADDRESS": "",
        CLUSTER_MARK: directory,
        MARK: mark,
    }
    try:
        if place == "hosts":
            with Network(environment={CLUSTER_MARK: directory, MARK: mark}) as network:
                yield _hosts(network, Path(directory, "ray"))
        else:
            with peer_process("simulated-nodes", settings, {}, task_type="builtins:dict") as (process, started):
                add = lambda cores: process.do("add", cores=cores)  # noqa: E731
                yield Nodes(started["address"], settings, "simulated", add=add)
    finally:
        end_reaper(reaper)


def _hosts(network: Network, directory: Path) -> Nodes:
    """Returns nodes that are hosts: the driver's has the head of the cluster and no cores, as with simulated nodes."""
    network.add(shm_mib=_SHM_MIB)
    cluster = Cluster(network, directory, cpus=0, store_mib=_STORE_MIB)
    return Nodes(
        cluster.address,
        network.environment,
        "hosts",
        add=lambda cores: cluster.join(network.add(shm_mib=_SHM_MIB), cpus=cores),
        enter=cluster.head.enter,
    )


def check_hosts() -> None:
    """Refuses hosts where this machine can't make them.

    Raises:
        ConfigError: It can't.
    """
    if problem := why_not():
        raise ConfigError(
            "--hosts makes hosts in network namespaces.",
            expected="Linux, root, and the programs ip, unshare and nsenter",
            got=problem,
            remedy="Run it as root (in a container: with --privileged), or leave --hosts out to simulate nodes.",
        )


def reachable(address: str) -> list[float]:
    """Returns the cores of each node of a cluster, from a process that gives up where Ray would retry for minutes.

    Raises:
        ConfigError: No Ray answers.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, address], timeout=_PROBE_S, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            cpus: list[float] = json.loads(done.stdout.splitlines()[-1])
            return cpus
        got = (done.stderr.strip().splitlines() or ["nothing"])[-1]
    except subprocess.TimeoutExpired:
        got = f"no answer within {_PROBE_S:g} s"
    raise ConfigError(
        "--address names a running Ray cluster.",
        expected="a cluster that answers, such as auto or host:6379",
        got=f"{address} ({got})",
        remedy="Start one (ray start --head), set RAY_AUTH_TOKEN if it asks for a token, "
        "or leave --address out to simulate nodes on this machine.",
    )


def check_memory(num_nodes: int, peers: Sequence[str], num_envs: int) -> None:
    """Refuses more emulated cores than this machine's memory has room for.

    Args:
        num_nodes: Simulated.
        peers: Which are measured, one after another; the upper bound runs beside each of the others.
        num_envs: Processes of a peer at most.

    Raises:
        ConfigError: There is not enough.
    """
    needs = {name: _ENV_MIB.get(name, _OTHER_ENV_MIB) for name in peers}
    peer = max((name for name in needs if name != "upper-bound"), key=lambda name: needs[name])
    each_mib = needs[peer] + needs.get("upper-bound", 0.0)
    needed = (num_nodes + 1) * _NODE_MIB + num_envs * each_mib
    available = psutil.virtual_memory().available / 2**20
    if needed > available:
        raise ConfigError(
            "Simulated nodes and emulated cores need memory.",
            expected=f"at least {needed / 1024:.1f} GiB available for {num_nodes} nodes with {num_envs} cores "
            f"({each_mib:.0f} MiB for each core with {peer})",
            got=f"{available / 1024:.1f} GiB",
            remedy="Lower --nodes or --cores-per-node"
            + ("." if peer == "rayvec" else f", or leave {peer} out of --peer."),
        )
