"""Opens the pool of a vector environment: of a Ray cluster, or of this machine without Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from rayvec.data.topology import Topology
from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, check_choice, check_count
from rayvec.node.local_pool import LocalPool
from rayvec.node.process_pool import ProcessPool
from rayvec.pools.base import ActingPool, RestartPolicy
from rayvec.pools.shared_memory import keep_freed_memory

__all__ = ["open_pool"]


def open_pool(
    factory: EnvFactory,
    *,
    num_nodes: int | tuple[int, int] | None,
    workers_per_node: int | None,
    restart_policy: RestartPolicy,
    on_node_loss: str,
    preload: Sequence[str],
    address: str | None,
    first_id: int = 0,
    worker_per_env: bool = False,
    claim_cpus: bool = True,
) -> ActingPool:
    """Opens a pool on the engine that `num_nodes` names: 0 is this machine without Ray, all else a Ray cluster.

    Args:
        factory: Makes all environments.
        num_nodes: As of :class:`rayvec.RayVecEnv`, like the next six.
        workers_per_node: Worker processes on each node.
        restart_policy: The restart policy.
        on_node_loss: ``"rehost"`` or ``"raise"``.
        preload: Modules that the workers import once for each node.
        address: Of a running Ray cluster.
        first_id: Global index of the first environment.
        worker_per_env: Whether each environment gets a worker of its own, unless it steps in this process.
        claim_cpus: Whether the workers' cores are claimed from Ray.

    Raises:
        ConfigError: Settings that can't work, or a cluster without the cores for them.
    """
    check_choice("on_node_loss", on_node_loss, ("rehost", "raise"))
    _check_first_id_and_preload(first_id, preload)
    if factory.native:
        keep_freed_memory(64 << 20)
    if num_nodes == 0 and num_nodes is not False:
        return _open_local(factory, restart_policy, workers_per_node, preload, address, worker_per_env, first_id)
    if first_id:
        raise ConfigError(
            "first_id numbers environments of one machine.",
            expected="first_id=0 with num_nodes unset or at least 1",
            got=f"first_id={first_id}",
            remedy="Leave first_id out, or pass num_nodes=0.",
        )
    # Programs without Ray do not import it: that takes a third of a second.
    from rayvec.cluster.open_ray_pool import open_ray_pool

    return open_ray_pool(
        factory,
        num_nodes=num_nodes,
        workers_per_node=workers_per_node,
        worker_per_env=worker_per_env,
        claim_cpus=claim_cpus,
        preload=preload,
        restart_policy=restart_policy,
        rehost=on_node_loss == "rehost",
        address=address,
    )


def _check_first_id_and_preload(first_id: Any, preload: Any) -> None:
    if isinstance(first_id, bool) or not isinstance(first_id, Integral) or int(first_id) < 0:
        raise ConfigError(
            "first_id is the global index of the first environment.",
            expected="a whole number of at least 0",
            got=repr(first_id),
            remedy="Leave first_id out, or pass how many environments the processes before this one have.",
        )
    if isinstance(preload, str) or not all(isinstance(name, str) for name in preload):
        raise ConfigError(
            "preload names modules that workers import.",
            expected="a list of names",
            got=repr(preload),
            remedy='Pass preload=["torch"].',
        )


def _open_local(
    factory: EnvFactory,
    restart_policy: RestartPolicy,
    workers: int | None,
    preload: Sequence[str],
    address: str | None,
    worker_per_env: bool,
    first_id: int,
) -> ActingPool:
    """Opens the pool of this machine without Ray: of worker processes, or of this process where `workers` is 0."""
    if address is not None:
        raise ConfigError(
            "num_nodes=0 steps environments on this machine, without Ray.",
            expected="no address beside num_nodes=0",
            got=f"address={address!r}",
            remedy="Leave address out, or pass num_nodes=1 or more.",
        )
    if workers == 0 and workers is not False:
        if restart_policy.step_timeout_s is not None:
            raise ConfigError(
                "workers_per_node=0 steps environments in this process, where no step can be stopped.",
                expected="no step_timeout_s beside workers_per_node=0",
                got=f"step_timeout_s={restart_policy.step_timeout_s:g}",
                remedy="Leave step_timeout_s out, or pass workers_per_node=1 or more.",
            )
        return LocalPool(factory, restart_policy, first_id)
    if workers is not None:
        check_count("workers_per_node", workers, least=0)
    num_workers = factory.num_envs if worker_per_env else workers or len(os.sched_getaffinity(0))
    num_workers = min(num_workers, factory.num_envs)
    name = Topology.of_this_node().nodes[0].name
    return ProcessPool.of(
        factory, num_workers, node=name, preload=preload, restart_policy=restart_policy, first_id=first_id
    )
