"""Environments on this machine without Ray: in worker processes, or in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rayvec.envs.factory import EnvFactory
from rayvec.errors import ConfigError, check_count
from rayvec.node.local_pool import LocalPool
from rayvec.node.process_pool import ProcessPool
from rayvec.pools.base import ActingPool, RestartPolicy

__all__ = ["open_local"]


def open_local(
    factory: EnvFactory,
    restart_policy: RestartPolicy,
    workers: int | None,
    preload: Sequence[str],
    address: str | None,
    first_id: int,
) -> ActingPool:
    """Opens the pool of this machine without Ray: of worker processes, or of this process where `workers` is 0.

    Raises:
        ConfigError: Settings that have no meaning without Ray, or without worker processes.
    """
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
        check_count("workers_per_node", workers)
    num_workers = min(workers or len(os.sched_getaffinity(0)), factory.num_envs)
    return ProcessPool.of(factory, num_workers, preload=preload, restart_policy=restart_policy, first_id=first_id)
