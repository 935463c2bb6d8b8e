"""Opens the environments of a vector environment: on a Ray cluster, or on this machine without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rayvec.data.cores import usable_cores
from rayvec.data.resources import EnvResources
from rayvec.data.topology import Topology, even_bounds
from rayvec.envs.factory import EnvFactory
from rayvec.envs.in_process import InProcess
from rayvec.envs.native_slices import make_slice
from rayvec.errors import ConfigError, check_choice, check_count, check_names
from rayvec.fleet.restarts import DEFAULT_RULES, EnvRules
from rayvec.node.machine import Machine, MachineSpec
from rayvec.node.probe import MAX_WAITING_WORKERS, probe_step
from rayvec.node.processes import check_not_importing
from rayvec.node.shared_memory import keep_freed_memory
from rayvec.node.worker_share import check_here

if TYPE_CHECKING:
    from rayvec.cluster.cluster import Cluster

Environments: TypeAlias = "InProcess | Machine | Cluster"
"""Where the environments are: in this process, in the workers of this machine, or on the nodes of a cluster."""


def open_environments(
    factory: EnvFactory,
    *,
    num_nodes: int | tuple[int, int] | None,
    workers_per_node: int | None,
    env_rules: EnvRules,
    on_node_loss: str,
    preload: Sequence[str],
    address: str | None,
    first_id: int = 0,
    worker_per_env: bool = False,
    claim_cpus: bool = True,
    probe: bool = True,
    cores_per_env: float | None = None,
    gpus_per_env: float | None = None,
    resources_per_env: Mapping[str, float] | None = None,
) -> Environments:
    """Opens environments where `num_nodes` says: 0 is this machine without Ray, all else a Ray cluster.

    Args:
        factory: Makes all environments.
        num_nodes: As of :class:`rayvec.RayVecEnv`, like the next six.
        workers_per_node: Worker processes on each node.
        env_rules: What happens to environments that raise, hang or have run for long, and their limits.
        on_node_loss: ``"rehost"`` or ``"raise"``.
        preload: Modules that the workers import once for each node.
        address: Of a running Ray cluster.
        first_id: Global index of the first environment.
        worker_per_env: Whether each environment gets a worker of its own, unless it steps in this process.
        claim_cpus: Whether the workers' cores are claimed from Ray.
        probe: Whether to measure steps of an environment where `workers_per_node` is None.
        cores_per_env: As of :class:`rayvec.RayVecEnv`, like the next two.
        gpus_per_env: GPUs of each environment.
        resources_per_env: Other resources of each environment.

    Raises:
        ConfigError: Settings that can't work, or a cluster without the cores for them.
    """
    check_choice("on_node_loss", on_node_loss, ("rehost", "raise"))
    resources = EnvResources.of(cores_per_env, gpus_per_env, resources_per_env)
    check_names("preload", preload)
    if factory.native:
        keep_freed_memory(64 << 20)
    if num_nodes == 0 and num_nodes is not False:
        _check_local(address, workers_per_node, env_rules, resources)
        if workers_per_node == 0:
            return InProcess(make_slice(factory, first_id, Topology.this_process, env_rules))
        if resources is not None:
            check_here(resources, factory.num_envs)
        has_own = worker_per_env or (resources is not None and workers_per_node is None)
        num_workers = factory.num_envs if has_own else workers_per_node
        num_workers = num_workers or local_workers(
            factory, usable_cores(), probe=probe, preload=preload, env_rules=env_rules
        )
        parts = factory.in_parts(even_bounds(factory.num_envs, min(num_workers, factory.num_envs)))
        name = Topology.of_this_node().nodes[0].name
        return Machine(MachineSpec(parts, first_id, factory.seed, name, tuple(preload), env_rules, resources))
    check_not_importing()
    if first_id:
        raise ConfigError(f"first_id={first_id} was passed with environments on Ray. It requires num_nodes=0.")
    # Programs without Ray do not import it: that takes a third of a second.
    from rayvec.cluster.cluster import open_cluster

    return open_cluster(
        factory,
        num_nodes=num_nodes,
        workers_per_node=workers_per_node,
        worker_per_env=worker_per_env,
        claim_cpus=claim_cpus or resources is not None,
        probe=probe and resources is None,
        preload=preload,
        env_rules=env_rules,
        rehost=on_node_loss == "rehost",
        address=address,
        resources=resources,
    )


def local_workers(
    factory: EnvFactory,
    cores: int,
    *,
    probe: bool = True,
    preload: Sequence[str] = (),
    env_rules: EnvRules = DEFAULT_RULES,
) -> int:
    """Returns how many workers to start by default: one for each core, or for each environment if its steps wait.

    Only where this makes a difference, an environment is made and stepped for it.
    """
    num_envs = factory.num_envs
    if factory.waits:
        return min(num_envs, MAX_WAITING_WORKERS)
    if not probe or factory.native or num_envs <= cores:
        return min(num_envs, cores)
    name = Topology.of_this_node().nodes[0].name

    def opened(factory: EnvFactory, limits: EnvRules) -> Machine:
        return Machine(MachineSpec(factory.in_parts((0, 1)), 0, factory.seed, name, tuple(preload), limits))

    step = probe_step(factory, env_rules, opened)
    return min(num_envs, MAX_WAITING_WORKERS) if step is not None and step.waits else cores


def _check_local(address: str | None, workers: int | None, env_rules: EnvRules, resources: EnvResources | None) -> None:
    """Checks what environments of this machine without Ray, that is ``num_nodes=0``, can be given."""
    if address is not None:
        raise ConfigError(
            f"address={address!r} names a Ray cluster, but num_nodes=0 uses this machine without Ray. "
            "Leave address out, or pass num_nodes=1 or more."
        )
    if workers is not None:
        check_count("workers_per_node", workers, least=0)
    if workers == 0 and env_rules.step_timeout_s is not None:
        raise ConfigError(
            f"step_timeout_s={env_rules.step_timeout_s:g} can't stop a step of workers_per_node=0, which runs in "
            "this process. Leave step_timeout_s out, or pass workers_per_node=1 or more."
        )
    if workers == 0 and resources is not None:
        raise ConfigError(
            "cores_per_env, gpus_per_env and resources_per_env are of a worker, but workers_per_node=0 steps in this "
            "process. Leave them out, or pass workers_per_node=1 or more."
        )
