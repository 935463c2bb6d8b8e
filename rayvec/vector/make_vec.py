"""``make_vec``, which mirrors ``gymnasium.make_vec``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from gymnasium.envs.registration import EnvSpec

from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["make_vec"]


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    *,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] | None = None,
    **kwargs: Any,
) -> RayVecEnv:
    """Makes a :class:`RayVecEnv` of a registered environment; mirrors ``gymnasium.make_vec``.

    Args:
        id: Id or spec. The spec of an environment that was made here makes another of the same kind and number.
        num_envs: How many environments.
        vector_kwargs: Arguments of :class:`RayVecEnv`.
        wrappers: Applied to each environment in order.
        **kwargs: Arguments of :class:`RayVecEnv`, by their names; all others are passed to the environment.

    >>> envs = make_vec("CartPole-v1", num_envs=4, workers_per_node=1, sutton_barto_reward=True)
    >>> envs
    RayVecEnv(CartPole-v1, num_envs=4)
    >>> envs.spec.kwargs["sutton_barto_reward"]
    True
    >>> envs.close()
    """
    ours = {name: kwargs.pop(name) for name in list(kwargs) if name in _KEYWORDS} | dict(vector_kwargs or {})
    env_kwargs: dict[str, Any] = {}
    if isinstance(id, EnvSpec):
        id = deepcopy(id)
        env_kwargs, id.kwargs = id.kwargs, {}  # with what gymnasium.make alone understands, such as max_episode_steps
        num_envs = env_kwargs.pop("num_envs", num_envs)
        ours = env_kwargs.pop("vector_kwargs", {}) | ours
        wrappers = env_kwargs.pop("wrappers", wrappers)
        env_kwargs.pop("vectorization_mode", None)  # of a spec of gymnasium.make_vec
    env_kwargs |= ours.pop("env_kwargs", {}) | kwargs
    env = RayVecEnv(id, num_envs, env_kwargs=env_kwargs, wrappers=tuple(wrappers or ()), **ours)
    env.spec = deepcopy(env.spec)
    assert env.spec is not None
    env.spec.kwargs.update(env_kwargs)
    for name, value, usual in (("num_envs", num_envs, 1), ("vector_kwargs", ours, {}), ("wrappers", wrappers, None)):
        if value != usual:
            env.spec.kwargs[name] = value
    return env


_KEYWORDS = set(inspect.signature(RayVecEnv.__init__).parameters) - {"self", "env", "num_envs", "wrappers"}
