"""Opens the pool of a cluster: connects to Ray and finds nodes with free cores."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayvec.cluster.elastic_placement import ElasticPlacement
from rayvec.cluster.node_supervisor import NodeSupervisor
from rayvec.cluster.node_variables import restore_variables
from rayvec.cluster.placement import FreeNode, free_nodes, look_until, plan_topology, wait_for_topology
from rayvec.cluster.ray_pool import RayPool
from rayvec.cluster.ray_session import RaySession
from rayvec.data import NodeSlice, Topology
from rayvec.envs.factory import EnvFactory
from rayvec.envs.step_time import StepTime
from rayvec.errors import NodeLostError, RemoteFailure, check_count
from rayvec.node.probe import MAX_WAITING_WORKERS, MIN_WAITING_CORES, log_probe, probe_step
from rayvec.pools.base import NO_RESTARTS, RestartPolicy
from rayvec.pools.in_process_base import FAILURES, captured

__all__ = ["open_ray_pool"]

_START_ATTEMPTS = 3
_FREED_S = 1.0
"""For how long to look for a free core, in seconds: Ray frees the cores of a closed pool with a delay."""

logger = logging.getLogger(__name__)


def open_ray_pool(
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
) -> RayPool:
    """Connects to Ray, finds nodes with free cores, and starts a pool on them.

    Args:
        factory: Makes all environments.
        num_nodes: How many nodes to use; by default all that have free cores. A pair is the least and the greatest
            number: environments then move as nodes join and leave.
        workers_per_node: Worker processes on each; by default one for each free core.
        worker_per_env: A worker for each environment, answered as soon as it is done.
        claim_cpus: Whether to claim the workers' cores from Ray, so that Ray gives them to no other task.
        probe: Whether to measure steps of an environment where `workers_per_node` is None.
        preload: As of :class:`~rayvec.cluster.node_supervisor.NodeSupervisor`.
        restart_policy: As of :class:`~rayvec.cluster.node_supervisor.NodeSupervisor`.
        rehost: As of :class:`~rayvec.cluster.node_supervisor.NodeSupervisor`.
        address: Of a running Ray cluster.

    Raises:
        ConfigError: Settings that can't work, or a cluster without the cores for them.
    """
    if not isinstance(num_nodes, tuple | list):
        for name, value, least in (("num_nodes", num_nodes, 0), ("workers_per_node", workers_per_node, 1)):
            if value is not None:
                check_count(name, value, least)  # num_nodes=0 does not come here, but is allowed
    else:
        ElasticPlacement(num_nodes, factory.num_envs, workers_per_node)  # checks them before it connects to Ray
    session = RaySession(address)
    try:
        sizes: dict[str, Any] = {"worker_per_env": worker_per_env}
        elastic = None

        def plan() -> Topology:
            assert not isinstance(num_nodes, tuple)
            find = partial(free_nodes, claimed_too=not claim_cpus)
            nodes = look_until(find, lambda found: _num_free(found) >= (num_nodes or len(found)), _FREED_S)
            topology = plan_topology(nodes, factory.num_envs, num_nodes, workers_per_node, **sizes)
            return topology if claim_cpus else topology.without_claims()

        if probe and not (workers_per_node or worker_per_env or factory.native):
            if isinstance(num_nodes, tuple | list):
                num_workers = sum(node.cpus for node in free_nodes()[: num_nodes[1]])
            else:
                num_workers = sum(node.num_workers for node in wait_for_topology(plan).nodes)
            if num_workers < factory.num_envs:
                sizes |= _sizes_for(_probe(factory, preload, restart_policy))
        if isinstance(num_nodes, tuple | list):
            elastic = ElasticPlacement(num_nodes, factory.num_envs, workers_per_node, claim_cpus=claim_cpus, **sizes)
        for attempt in range(_START_ATTEMPTS):
            topology = elastic.first_topology(restart_policy.start_timeout_s) if elastic else wait_for_topology(plan)
            if unclaimed := [node.name for node in topology.nodes if claim_cpus and not node.num_cpus]:
                logger.warning("no core is free on %s: workers run there without claiming any", ", ".join(unclaimed))
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


def _sizes_for(step: StepTime | None) -> dict[str, Any]:
    """Returns the arguments of placement for environments of such a step."""
    if step is None or not step.waits:
        return {}
    cores = max(MIN_WAITING_CORES, step.busy)
    return {"worker_per_env": True, "max_workers": MAX_WAITING_WORKERS, "cores_per_worker": cores}


def _num_free(nodes: Sequence[FreeNode]) -> int:
    return sum(node.cpus > 0 for node in nodes)


def _probe(factory: EnvFactory, preload: Sequence[str], restart_policy: RestartPolicy) -> StepTime | None:
    """Measures steps of one environment: on the driver's node if that has cores, else on the first node that has."""
    nodes = free_nodes()
    if not nodes:
        return None
    node_id, name = nodes[0].node_id, NodeSlice(nodes[0].node_id, nodes[0].address, (0,), 0).name
    if node_id == ray.get_runtime_context().get_node_id():
        return log_probe(lambda: probe_step(factory, name, preload, restart_policy))
    affinity: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=affinity)(_probe_on_node)
    pickled = factory.to_bytes()
    return log_probe(lambda: _result(task.remote(pickled, name, preload, restart_policy)))


def _probe_on_node(
    factory: bytes, name: str, preload: Sequence[str], restart_policy: RestartPolicy
) -> StepTime | str | RemoteFailure:
    restore_variables("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    try:
        return probe_step(pickle.loads(factory), name, preload, restart_policy)
    except FAILURES as error:
        return captured(error, f"node {name}")


def _result(task: Any) -> StepTime | str:
    """Waits for a probe on another node, and ends it where this is interrupted."""
    try:
        found: StepTime | str | RemoteFailure = ray.get(task)
    except ray.exceptions.RayError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ray.cancel(task, force=True)
    if isinstance(found, RemoteFailure):
        raise found.rebuild()
    return found
