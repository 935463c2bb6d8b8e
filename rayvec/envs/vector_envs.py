"""Vector environments that users' callables make: native sub-batches."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from rayvec.data.trees import ArrayLayout
from rayvec.errors import ConfigError
from rayvec.fleet.spaces import PoolSpaces


def as_vector_env(env: Any) -> VectorEnv[Any, Any, Any]:
    """Returns what a callable made as a vector environment.

    Raises:
        ConfigError: It is neither a vector environment nor an EnvPool that steps as a whole.
    """
    if any(kind.__module__.startswith("envpool.") for kind in type(env).__mro__):
        return _EnvPool(env)
    if not isinstance(env, VectorEnv):
        raise ConfigError(
            f"A callable has made a {type(env).__module__}.{type(env).__qualname__}. With native=True, each callable "
            "makes a vector environment, a gymnasium.vector.VectorEnv. Leave native out if it makes one environment."
        )
    return env


def spaces_of(env: VectorEnv[Any, Any, Any]) -> PoolSpaces:
    """Returns the spaces, metadata and size of a vector environment.

    Raises:
        ConfigError: It has no autoreset mode, or no arrays hold elements of its spaces.
    """
    observation, action, metadata = env.single_observation_space, env.single_action_space, dict(env.metadata or {})
    kind = type(env).__name__
    try:
        mode = AutoresetMode(metadata.get("autoreset_mode"))
    except ValueError as error:
        raise ConfigError(
            f"The autoreset_mode in the metadata of a {kind} is {metadata.get('autoreset_mode')!r}. Set it to a "
            "gymnasium.vector.AutoresetMode: it says when environments whose episode has ended are reset."
        ) from error
    for name, space in (("observation", observation), ("action", action)):
        if ArrayLayout.of(space).objects:
            raise ConfigError(
                f"The {name}s of a {kind} are {space}. Native sub-batches need a Box, Discrete, MultiDiscrete or "
                "MultiBinary space, or a Dict or Tuple of them: make it an ordinary environment, or convert it by a "
                "wrapper."
            )
    metadata["autoreset_mode"], render_mode = mode, getattr(env, "render_mode", None)
    return PoolSpaces(observation, action, metadata, render_mode, env.num_envs, sub_batches=(env.num_envs,))


def has_single_envs(env: Any) -> bool:
    """Whether a vector environment consists of single ones, each with a seed and attributes of its own."""
    return isinstance(env, SyncVectorEnv | AsyncVectorEnv)


def layer_with(env: Any, name: str) -> Any:
    """Returns the outermost wrapper of a vector environment that has an attribute, or else what is wrapped."""
    while isinstance(env, VectorWrapper) and not hasattr(env, name):
        env = env.env
    return env


class _EnvPool(VectorEnv[Any, Any, Any]):
    """EnvPool's Gymnasium interface as a vector environment.

    Seeds count only when a pool is made. Infos have indices of environments within the pool, which are left out.
    """

    def __init__(self, pool: Any) -> None:
        self.pool, self.num_envs = pool, int(pool.config["num_envs"])
        if pool.config["batch_size"] not in (0, self.num_envs):
            raise ConfigError(
                f"An EnvPool has batch_size={pool.config['batch_size']} of {self.num_envs} environments. A native "
                "sub-batch steps as a whole: leave batch_size out."
            )
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = pool.observation_space, pool.action_space
        self.observation_space = batch_space(pool.observation_space, self.num_envs)
        self.action_space = batch_space(pool.action_space, self.num_envs)

    def reset(self, **kwargs: Any) -> Any:
        return self._without_ids(*self.pool.reset())

    def step(self, actions: Any) -> Any:
        return self._without_ids(*self.pool.step(actions))

    def _without_ids(self, *results: Any) -> Any:
        *arrays, info = results
        return *arrays, {key: value for key, value in info.items() if key not in ("env_id", "players")}

    def close(self, **kwargs: Any) -> None:
        self.pool.close()
