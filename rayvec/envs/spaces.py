"""What environments say of themselves when they have been made, and vector environments that users' callables make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from rayvec.data.layouts import ArrayLayout
from rayvec.errors import ConfigError
from rayvec.fleet.commands import Autoreset

__all__ = ["PoolSpaces", "as_vector_env", "has_single_envs", "layer_with", "spaces_of"]


@dataclass(frozen=True, slots=True)
class PoolSpaces:
    """The spaces and metadata that a pool reads from its environments.

    Attributes:
        observation: Space of the first environment's observations.
        action: Space of the first environment's actions.
        metadata: Metadata of the first environment.
        render_mode: Render mode of the first environment.
        observations: The observation space of each environment, in order. Empty if all are equal.
        actions_differ: Index and action space of the first environment whose action space differs from `action`.
        sub_batches: Number of environments of each native sub-batch, in order. Empty for ordinary environments.
    """

    observation: Space[Any]
    action: Space[Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    render_mode: str | None = None
    observations: tuple[Space[Any], ...] = ()
    actions_differ: tuple[int, Space[Any]] | None = None
    sub_batches: tuple[int, ...] = ()

    @property
    def num_envs(self) -> int | None:
        """How many environments there are, if they are native."""
        return sum(self.sub_batches) or None

    @property
    def unit_bounds(self) -> NDArray[np.int64] | None:
        """Bounds of the native sub-batches, ``int64 [sub-batches + 1]``, or None."""
        return np.cumsum([0, *self.sub_batches]) if self.sub_batches else None

    @property
    def native_mode(self) -> Autoreset | None:
        """The autoreset mode of native sub-batches, or None."""
        return Autoreset[self.metadata["autoreset_mode"].name] if self.sub_batches else None

    @classmethod
    def join(cls, parts: Sequence[tuple[int, PoolSpaces]]) -> PoolSpaces:
        """Joins the spaces of consecutive slices, given as pairs (number of environments, their spaces)."""
        first = parts[0][1]
        for mode in (part.metadata.get("autoreset_mode") for _, part in parts if part.sub_batches):
            if mode != first.metadata.get("autoreset_mode"):
                raise ConfigError(
                    f"Native sub-batches have different autoreset modes: {first.metadata.get('autoreset_mode')} and "
                    f"{mode}. Make them with one autoreset_mode."
                )
        every = [space for count, part in parts for space in (part.observations or (part.observation,) * count)]
        starts = accumulate((count for count, _ in parts[:-1]), initial=0)
        others = [(0, part.action) if part.action != first.action else part.actions_differ for _, part in parts]
        differ = next(((start + each[0], each[1]) for start, each in zip(starts, others, strict=True) if each), None)
        same = all(part.observation == first.observation and not part.observations for _, part in parts)
        return cls(
            first.observation,
            first.action,
            first.metadata,
            first.render_mode,
            () if same else tuple(every),
            differ,
            tuple(size for _, part in parts for size in part.sub_batches),
        )

    def check_native(self, num_envs: int | None, mode: AutoresetMode | None) -> None:
        """Checks what a caller demands of native sub-batches: their number of environments and autoreset mode.

        Raises:
            ConfigError: They have another.
        """
        if self.sub_batches and num_envs not in (None, self.num_envs):
            raise ConfigError(
                f"num_envs={num_envs} was passed, but the native sub-batches have {self.num_envs} environments "
                f"together ({list(self.sub_batches)[:8]}). With a list of callables, leave num_envs out. Otherwise let "
                "num_envs and workers_per_node give each worker as many rows as its vector environment can have (for "
                "games, a multiple of the number of agents); where that number is fixed, pass workers_per_node=1."
            )
        if self.sub_batches and mode not in (None, self.metadata["autoreset_mode"]):
            raise ConfigError(
                f"autoreset_mode={mode} was passed, but the native sub-batches, which reset by themselves, have "
                f"{self.metadata['autoreset_mode']}. Leave autoreset_mode out, or make the sub-batches with another; "
                "make_vec passes env_kwargs={'autoreset_mode': ...} to the vector entry point."
            )

    def misfit(self, space: Space[Any]) -> int | None:
        """Returns the index of the first environment whose observations don't fit arrays of `space`, or None."""
        candidates = enumerate(self.observations or (self.observation,))
        return next((i for i, each in candidates if not is_space_dtype_shape_equiv(each, space)), None)


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
        if ArrayLayout.of(space) is None:
            raise ConfigError(
                f"The {name}s of a {kind} are {space}. Native sub-batches need a Box, Discrete, MultiDiscrete or "
                "MultiBinary space, or a Dict or Tuple of them: make it an ordinary environment, or convert it by a "
                "wrapper."
            )
    metadata["autoreset_mode"], render_mode = mode, getattr(env, "render_mode", None)
    return PoolSpaces(observation, action, metadata, render_mode, sub_batches=(env.num_envs,))


def has_single_envs(env: Any) -> bool:
    """Whether a vector environment consists of single ones, each with a seed and attributes of its own."""
    return isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)


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
        self.num_envs = int(pool.config["num_envs"])
        if pool.config["batch_size"] not in (0, self.num_envs):
            raise ConfigError(
                f"An EnvPool has batch_size={pool.config['batch_size']} of {self.num_envs} environments. A native "
                "sub-batch steps as a whole: leave batch_size out."
            )
        self.pool, self.render_mode = pool, getattr(pool, "render_mode", None)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, **(getattr(pool, "metadata", None) or {})}
        self.single_observation_space, self.single_action_space = pool.observation_space, pool.action_space
        self.observation_space = batch_space(pool.observation_space, self.num_envs)
        self.action_space = batch_space(pool.action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.pool.reset()
        return obs, _without_ids(info)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *results, info = self.pool.step(actions)
        return *results, _without_ids(info)

    def close(self, **kwargs: Any) -> None:
        self.pool.close()


def _without_ids(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key not in ("env_id", "players")}
