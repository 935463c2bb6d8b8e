"""Makes the innermost pool: of single environments, or of native sub-batches."""

from __future__ import annotations

from rayvec.envs.factory import EnvFactory
from rayvec.pools.base import NO_RESTARTS, RestartPolicy
from rayvec.pools.step_and_autoreset import SerialPool
from rayvec.pools.sub_batch_pool import NativePool

__all__ = ["make_pool"]


def make_pool(
    factory: EnvFactory, first_id: int, where: str, restart_policy: RestartPolicy = NO_RESTARTS
) -> SerialPool | NativePool:
    """Returns the innermost pool for the environments of a factory."""
    kind = NativePool if factory.native else SerialPool
    return kind(factory, first_id, where, restart_policy)
