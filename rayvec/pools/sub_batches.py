"""Makes native sub-batches, and says what spaces they have."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from rayvec.envs.factory import EnvFactory
from rayvec.envs.sub_batch import SubBatch
from rayvec.errors import ConfigError
from rayvec.pools.base import PoolSpaces
from rayvec.pools.shared_memory import ArrayLayout

__all__ = ["made", "spaces_of"]


def made(factory: EnvFactory, unit: int) -> SubBatch:
    """Makes a sub-batch and checks what it is."""
    env: Any = factory.make(unit)
    return SubBatch(env)


def spaces_of(env: SubBatch) -> PoolSpaces:
    """Returns the spaces of a sub-batch.

    Raises:
        ConfigError: No arrays hold their elements.
    """
    for name, space in (("observation", env.observation_space), ("action", env.action_space)):
        if ArrayLayout.of(space) is None:
            raise ConfigError(
                f"A native sub-batch has {name}s in arrays.",
                expected="a Box, Discrete, MultiDiscrete or MultiBinary space, or a Dict or Tuple of them",
                got=space,
                remedy="Make it an ordinary environment, or convert it by a wrapper.",
            )
    assert isinstance(env.mode, AutoresetMode)
    return PoolSpaces(
        env.observation_space, env.action_space, env.metadata, env.render_mode, sub_batches=(env.num_envs,)
    )
