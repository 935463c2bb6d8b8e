"""Examines the nodes of a Ray cluster, each by an actor that claims no core."""

from __future__ import annotations

import os
import secrets
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle as ray_pickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.bench.cost_model.command import describe
from rayvec.bench.cost_model.default_fit import DEFAULT_FIT
from rayvec.bench.cost_model.model import Cluster, Setting, recommend, steps_per_s
from rayvec.cluster.ray_session import RaySession
from rayvec.cluster.tcp_stream import Listener, connect
from rayvec.doctor import probe
from rayvec.doctor.findings import Finding, Node, of_network, of_node, of_versions
from rayvec.envs.factory import EnvFactory
from rayvec.errors import duration, first_line, without_remedy

__all__ = ["examine", "recommended"]

_ANSWER_S = 60.0
_MAKE_S = 300.0
_STEPPING_S = 1.0
_ENVS_PER_CORE = (1, 8, 32)
_MOST = 0.9
"""The fewest environments are recommended with which at least this share of the most steps/s is predicted."""


def examine(address: str | None, env_id: str | None) -> Iterator[Finding]:
    """Yields the findings of this process and of every node of a cluster.

    Args:
        address: Of a Ray cluster; see :class:`~rayvec.cluster.ray_session.RaySession`.
        env_id: An environment to measure on every node; None for none.

    Raises:
        EnvIdError: No environment of that id is registered.
    """
    factory = None if env_id is None else EnvFactory.build(env_id, 1).to_bytes()
    driver = probe.read_facts()
    yield from of_versions(driver, driver, "driver")
    yield from of_node(driver, "driver")
    try:
        session = RaySession(address)
    except Exception as error:
        yield _no_ray(address, error)
        return
    with session:
        where = address or os.environ.get("RAY_ADDRESS") or "a private local cluster"
        yield Finding("ok", "driver", "ray", f"answers: {where}")
        yield from _Examination(driver).run(env_id, factory)


def _no_ray(address: str | None, error: Exception) -> Finding:
    return Finding(
        "error",
        "driver",
        "ray",
        found=" ".join(without_remedy(error).split()) or type(error).__name__,
        meaning="A run on several nodes cannot start." if address else "Only num_nodes=0 works, which needs no Ray.",
        remedy="Start Ray (ray start --head), or check the address, RAY_AUTH_MODE and RAY_AUTH_TOKEN.",
    )


class _Examination:
    """Examines the connected cluster.

    Args:
        driver: What `read_facts` returned in this process.
    """

    def __init__(self, driver: Mapping[str, Any]) -> None:
        self._driver = driver
        self._nodes = _nodes()
        ray_pickle.register_pickle_by_value(probe)  # a node may have another rayvec, or none
        try:
            actor = ray.remote(num_cpus=0, max_restarts=0)(probe.NodeProbe)
            self._probes: dict[str, Any] = {
                node.node_id: actor.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
                ).remote()
                for node in self._nodes
            }
        finally:
            ray_pickle.unregister_pickle_by_value(probe)
        self._networks: list[tuple[float, float]] = []

    def run(self, env_id: str | None, factory: bytes | None) -> Iterator[Finding]:
        """Yields the findings of each node, and then those about an environment that a pickled factory makes."""
        pending = [(node, self._probes[node.node_id].facts.remote()) for node in self._nodes]
        reached = []
        for node, ref in pending:
            try:
                facts = ray.get(ref, timeout=_ANSWER_S)
            except ray.exceptions.RayError as error:
                yield _silent(node, error)
                continue
            yield from of_versions(facts, self._driver, node.name)
            yield from of_node(facts, node.name, node, self._driver["niceness"])
            if facts["versions"]["rayvec"] is not None:
                yield from self._network(node, facts)
                reached.append(node)
        if env_id is not None and factory is not None:
            yield from self._environment(reached, env_id, factory)

    def _network(self, node: Node, facts: Mapping[str, Any]) -> Iterator[Finding]:
        """Yields whether streams connect both ways, and how fast they are."""
        if node.is_driver:
            yield Finding("ok", node.name, "network", "the driver's own node")
            return
        key, ports = secrets.token_bytes(32), "-".join(map(str, facts["ports"]))
        here = ray.util.get_node_ip_address()
        there = f"from {here} to {node.address}, ports {ports}"
        back = f"from {node.address} to {here}, ports {'-'.join(map(str, self._driver['ports']))}"
        try:
            port = self._ask(node, "listen", node.address, key)
            with connect(node.address, port, key) as connection:
                self._networks.append(probe.ping(connection))
            yield Finding("ok", node.name, "port there", there)
            yield of_network(node.name, *self._networks[-1])
        except (OSError, ray.exceptions.RayError) as error:
            yield _blocked(
                node, "port there", there, _first_line(error), "The driver cannot step environments of this node."
            )
        listener = Listener(here, key, lambda connection: None)
        try:
            wrong = self._ask(node, "connect", here, listener.port, key)
        except ray.exceptions.RayError as error:
            wrong = _first_line(error)
        finally:
            listener.close()
        if wrong:
            yield _blocked(node, "port back", back, wrong, "Ranks of learners cannot connect from this node.")
        else:
            yield Finding("ok", node.name, "port back", back)

    def _ask(self, node: Node, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._probes[node.node_id], method).remote(*args), timeout=_ANSWER_S)

    def _environment(self, nodes: Sequence[Node], env_id: str, factory: bytes) -> Iterator[Finding]:
        """Yields the step duration on each node, and the recommended setting for all of them."""
        pending = [(node, self._probes[node.node_id].time_env.remote(factory, _STEPPING_S)) for node in nodes]
        measured: list[tuple[Node, dict[str, Any]]] = []
        for node, ref in pending:
            try:
                found = ray.get(ref, timeout=_MAKE_S)
            except ray.exceptions.RayError as error:
                found = {"error": _first_line(error)}
            if "error" in found:
                yield Finding(
                    "error",
                    node.name,
                    "environment",
                    found["error"],
                    meaning=f"{env_id} cannot be made or stepped there.",
                    remedy="Install on that node what the environment needs, or correct the environment.",
                )
                continue
            measured.append((node, found))
            times = f"made in {found['make_s']:.2f} s, a step takes {duration(found['step_s'])}"
            yield Finding("ok", node.name, "environment", f"{env_id}: {times}")
        if measured:
            yield from _slow_nodes(measured)
            yield recommended(measured, self._networks)


def recommended(measured: Sequence[tuple[Node, Mapping[str, Any]]], networks: Sequence[tuple[float, float]]) -> Finding:
    """Returns the setting that the cost model recommends.

    It was fitted on another machine. So it says which setting is fast here, but not how fast.
    """
    cores = min(max(1, node.cores) for node, _ in measured)
    one = {name: statistics.fmean(each[name] for _, each in measured) for name in ("step_s", "sigma", "obs_bytes")}
    base = Setting(len(measured), cores, step_s=one["step_s"], sigma=one["sigma"], obs_bytes=int(one["obs_bytes"]))
    round_trip = max((each for each, _ in networks), default=0.0)
    width = min((each for _, each in networks), default=float("inf"))
    network = Cluster(latency_s=round_trip / 2, bytes_per_s=width)
    best_of = [recommend(DEFAULT_FIT, base, len(measured) * cores * k, cores, network) for k in _ENVS_PER_CORE]
    rates = [steps_per_s(DEFAULT_FIT, each, network) for each in best_of]
    best = next(each for each, rate in zip(best_of, rates, strict=True) if rate > _MOST * max(rates))
    nodes = len(measured) if len(measured) > 1 else 0
    options = f"--num-envs {best.num_envs} --num-nodes {nodes} --workers-per-node {best.workers}"
    options += f" --inference {best.inference}" + (
        f" --num-steps {best.chunk_steps}" if best.inference == "worker" else f" --groups {best.groups}"
    )
    return Finding("ok", "driver", "setting", f"{options} ({describe(best)})")


def _nodes() -> list[Node]:
    """Returns the live nodes, the driver's own first."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    count = Counter(node["NodeManagerAddress"] for node in alive)
    found = []
    for node in alive:
        node_id, address = node["NodeID"], node["NodeManagerAddress"]
        name = address if count[address] == 1 else f"{address}/{node_id[:8]}"
        found.append(Node(node_id, name, address, node["Resources"], node_id == here))
    return sorted(found, key=lambda node: (not node.is_driver, node.name))


def _silent(node: Node, error: Exception) -> Finding:
    return Finding(
        "error",
        node.name,
        "answer",
        _first_line(error),
        meaning="No worker can start there: the node is lost or overloaded, or its Python cannot run Ray's workers.",
        remedy="Look into the logs of Ray on that node (/tmp/ray/session_latest/logs), or stop Ray there.",
    )


def _blocked(node: Node, check: str, way: str, reason: str, meaning: str) -> Finding:
    return Finding(
        "error",
        node.name,
        check,
        f"{way}: {reason}",
        meaning,
        remedy="Open these ports between the nodes: a firewall may block them.",
    )


def _slow_nodes(measured: Sequence[tuple[Node, Mapping[str, Any]]]) -> Iterator[Finding]:
    usual = statistics.median(each["step_s"] for _, each in measured)
    for node, each in measured:
        if each["step_s"] > 2 * usual:
            times = f"{each['step_s'] / usual:.1f} times as long as elsewhere"
            yield Finding(
                "warning",
                node.name,
                "environment",
                f"a step takes {duration(each['step_s'])}, {times}",
                meaning="All nodes wait for the slowest.",
                remedy="Look for other work on it, or train with learners='decentralized' and sync_fraction=0.6.",
            )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
