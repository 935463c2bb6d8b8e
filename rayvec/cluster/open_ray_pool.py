"""Opens the pool of a cluster: connects to Ray and finds nodes with free cores."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rayvec.cluster.elastic_placement import ElasticPlacement
from rayvec.cluster.node_supervisor import NodeSupervisor
from rayvec.cluster.placement import free_nodes, plan_topology, wait_for_topology
from rayvec.cluster.ray_pool import RayPool
from rayvec.cluster.ray_session import RaySession
from rayvec.data import Topology
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError, check_count
from rayvec.pools.base import NO_RESTARTS, RestartPolicy

__all__ = ["open_ray_pool"]

_START_ATTEMPTS = 3

logger = logging.getLogger(__name__)


def open_ray_pool(
    factory: EnvFactory,
    *,
    num_nodes: int | tuple[int, int] | None = None,
    workers_per_node: int | None = None,
    worker_per_env: bool = False,
    claim_cpus: bool = True,
    preload: Sequence[str] = (),
    restart_policy: RestartPolicy = NO_RESTARTS,
    rehost: bool = False,
    address: str | None = None,
) -> RayPool:
    """Connects to Ray, finds nodes with free cores, and starts a pool on them.

    Args:
        factory: Makes all environments.
        num_nodes: How many nodes to use; by default all that have free cores. A pair is the least and the greatest
            number: environments then move as nodes join and leave.
        workers_per_node: Worker processes on each; by default one for each free core.
        worker_per_env: A worker for each environment, answered as soon as it is done.
        claim_cpus: Whether to claim the workers' cores from Ray, so that Ray gives them to no other task.
        preload: As of :class:`~rayvec.cluster.node_supervisor.NodeSupervisor`.
        restart_policy: As of :class:`~rayvec.cluster.node_supervisor.NodeSupervisor`.
        rehost: As of :class:`~rayvec.cluster.node_supervisor.NodeSupervisor`.
        address: Of a running Ray cluster.

    Raises:
        ConfigError: Settings that can't work, or a cluster without the cores for them.
    """
    elastic = None
    if isinstance(num_nodes, tuple | list):
        elastic = ElasticPlacement(
            num_nodes,
            factory.num_envs,
            workers_per_node,
            worker_per_env=worker_per_env,
            claim_cpus=claim_cpus,
        )
    else:
        for name, value, least in (("num_nodes", num_nodes, 0), ("workers_per_node", workers_per_node, 1)):
            if value is not None:
                check_count(name, value, least)  # num_nodes=0 does not come here, but is allowed
    session = RaySession(address)

    def plan() -> Topology:
        assert not isinstance(num_nodes, tuple)
        nodes = free_nodes(claimed_too=not claim_cpus)
        topology = plan_topology(nodes, factory.num_envs, num_nodes, workers_per_node, worker_per_env=worker_per_env)
        return topology if claim_cpus else topology.without_claims()

    try:
        for attempt in range(_START_ATTEMPTS):
            topology = elastic.first_topology(restart_policy.start_timeout_s) if elastic else wait_for_topology(plan)
            try:
                return RayPool(
                    NodeSupervisor(
                        factory,
                        topology,
                        preload,
                        restart_policy,
                        rehost=rehost,
                        loose=worker_per_env,
                        elastic=elastic,
                        session=session,
                    )
                )
            except NodeLostError as error:  # a node that ended may be listed for some seconds
                if attempt + 1 == _START_ATTEMPTS:
                    raise
                logger.warning("placing environments again: %s", error)
        raise AssertionError("unreachable")
    except BaseException:
        session.release()
        raise
