"""Opens the environments of a cluster: connects to Ray, finds nodes with free cores, and starts nodes there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rayvec.cluster.cluster import Cluster
from rayvec.cluster.placement import free_nodes
from rayvec.cluster.ray_places import Demand, ElasticPlaces, RayPlaces
from rayvec.cluster.ray_session import RaySession
from rayvec.data import NodeSlice, Topology
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError
from rayvec.fleet.restarts import NO_RESTARTS, RestartPolicy
from rayvec.node.probe import MAX_WAITING_WORKERS, MIN_WAITING_CORES, log_probe, probe_step

__all__ = ["open_cluster"]

_START_ATTEMPTS = 3

logger = logging.getLogger(__name__)


def open_cluster(
    factory: EnvFactory,
    *,
    num_nodes: int | tuple[int, int] | None = None,
    workers_per_node: int | None = None,
    worker_per_env: bool = False,
    claim_cpus: bool = True,
    probe: bool = True,
    preload: Sequence[str] = (),
    restart_policy: RestartPolicy = NO_RESTARTS,
    rehost: bool = False,
    address: str | None = None,
) -> Cluster:
    """Connects to Ray, finds nodes with free cores, and starts environments on them.

    Args:
        factory: Makes all environments.
        num_nodes: How many nodes to use; by default all that have free cores. A pair is the least and the greatest
            number: environments then move as nodes join and leave.
        workers_per_node: Worker processes on each; by default one for each free core.
        worker_per_env: Whether each environment gets a worker of its own.
        claim_cpus: Whether to claim the workers' cores from Ray, so that Ray gives them to no other task.
        probe: Whether to measure steps of an environment where `workers_per_node` is None.
        preload: Modules that the workers of a node import once.
        restart_policy: Whether environments that raise, and workers that die or hang, are replaced.
        rehost: Whether environments of a lost node resume on another.
        address: Of a running Ray cluster.

    Raises:
        ConfigError: Settings that can't work, or a cluster without the cores for them.
    """
    sizes: dict[str, Any] = {"worker_per_env": worker_per_env}
    demand = Demand(factory, tuple(preload), restart_policy, num_nodes, workers_per_node, claim_cpus, sizes)
    places = (ElasticPlaces if isinstance(num_nodes, tuple | list) else RayPlaces)(demand)
    session = RaySession(address)
    try:
        if probe and not (workers_per_node or worker_per_env or factory.native):
            sizes |= _probe(demand)
        for attempt in range(_START_ATTEMPTS):
            topology = places.topology()
            if unclaimed := [node.name for node in topology.nodes if claim_cpus and not node.num_cpus]:
                logger.warning("no core is free on %s: workers run there without claiming any", ", ".join(unclaimed))
            try:
                return Cluster(topology, places, rehost=rehost, release=session.release)
            except NodeLostError as error:  # a node that ended may be listed for some seconds
                if attempt + 1 == _START_ATTEMPTS:
                    raise
                logger.warning("placing environments again: %s", error)
        raise AssertionError("unreachable")
    except BaseException:
        session.release()
        raise


def _probe(demand: Demand) -> dict[str, Any]:
    """Measures steps of one environment, if there are more of them than cores. Returns the sizes of placement.

    It runs on the driver's node if that has cores, else on the first node that has.
    """
    nodes = free_nodes()[: max(demand.num_nodes) if isinstance(demand.num_nodes, tuple | list) else demand.num_nodes]
    if not nodes or sum(node.cpus for node in nodes) >= demand.factory.num_envs:
        return {}
    place = NodeSlice(nodes[0].node_id, nodes[0].address, (0, 1), 0)

    def opened(factory: EnvFactory, restart_policy: RestartPolicy) -> Cluster:
        return Cluster(Topology((place,)), RayPlaces(demand._replace(factory=factory, restart_policy=restart_policy)))

    step = log_probe(lambda: probe_step(demand.factory, demand.restart_policy, opened))
    if step is None or not step.waits:
        return {}
    cores = max(MIN_WAITING_CORES, step.busy)
    return {"worker_per_env": True, "max_workers": MAX_WAITING_WORKERS, "cores_per_worker": cores}
