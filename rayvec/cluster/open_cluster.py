"""Opens the environments of a cluster: connects to Ray, finds nodes with free cores, and starts nodes there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from rayvec.cluster.cluster import Cluster
from rayvec.cluster.placement import Demand
from rayvec.cluster.places import ElasticPlaces, RayPlaces
from rayvec.cluster.ray_session import ray_session
from rayvec.data import NodeSlice, Topology
from rayvec.data.resources import EnvResources
from rayvec.envs.factory import EnvFactory
from rayvec.errors import NodeLostError
from rayvec.fleet.restarts import DEFAULT_RULES, EnvRules
from rayvec.node.probe import MAX_WAITING_WORKERS, MIN_WAITING_CORES, probe_step

_MAX_ATTEMPTS = 3

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
    env_rules: EnvRules = DEFAULT_RULES,
    rehost: bool = False,
    address: str | None = None,
    resources: EnvResources | None = None,
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
        env_rules: What happens to environments that raise, hang or have run for long, and their limits.
        rehost: Whether environments of a lost node resume on another.
        address: Of a running Ray cluster.
        resources: What is claimed for each environment, in place of cores for workers. Each environment then gets a
            worker of its own, unless `workers_per_node` is set.

    Raises:
        ConfigError: Settings that can't work, or a cluster without the cores for them.
    """
    demand = Demand(
        factory.num_envs,
        num_nodes,
        workers_per_node,
        worker_per_env=worker_per_env,
        claim_cpus=claim_cpus,
        resources=resources,
    )
    kind = ElasticPlaces if isinstance(num_nodes, tuple | list) else RayPlaces
    places = kind(factory, preload, env_rules, demand)
    probes = probe and demand.takes_what_is_free and not (worker_per_env or factory.native)
    num_attempts = 0
    with ray_session(address) as session:
        while True:
            num_attempts += 1
            try:
                topology = places.topology()
                if probes and sum(node.num_workers for node in topology.nodes) < factory.num_envs:
                    places.demand, probes = _probed(places, topology.nodes[0]), False
                    topology = places.topology()
                unclaimed = ", ".join(node.name for node in topology.nodes if not node.num_cpus)
                if unclaimed and claim_cpus and resources is None:
                    logger.warning("no core is free on %s: workers run there without claiming any", unclaimed)
                cluster = Cluster(topology, places, rehost=rehost, replay_calls=env_rules.replay_calls)
                cluster.session = session.pop_all()
                return cluster
            except NodeLostError as error:  # a node that ended may be listed for some seconds
                if num_attempts == _MAX_ATTEMPTS:
                    raise
                logger.warning("placing environments again: %s", error)


def _probed(places: RayPlaces, node: NodeSlice) -> Demand:
    """Measures steps of one environment on a node. Returns the demand that follows."""
    place = replace(node, worker_bounds=(0, 1), num_cpus=0)

    def opened(factory: EnvFactory, env_rules: EnvRules) -> Cluster:
        return Cluster(Topology((place,)), RayPlaces(factory, places.preload, env_rules, Demand(1)))

    step = probe_step(places.factory, places.env_rules, opened)
    if step is None or not step.waits:
        return places.demand
    share = max(MIN_WAITING_CORES, step.busy)
    return replace(places.demand, worker_per_env=True, max_workers=MAX_WAITING_WORKERS, cores_per_worker=share)
