"""``make_vec``, which mirrors ``gymnasium.make_vec``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, VectorizeMode

from rayvec.data.cores import usable_cores
from rayvec.data.topology import even_bounds
from rayvec.envs.factory import spec_of
from rayvec.errors import ConfigError, check_choice, check_count, check_node_range
from rayvec.vector.ray_vec_env import RayVecEnv


def make_vec(
    id: str | EnvSpec | Callable[..., Any],
    num_envs: int = 1,
    *,
    vectorization_mode: str | VectorizeMode | None = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] | None = None,
    **kwargs: Any,
) -> RayVecEnv:
    """Makes a :class:`RayVecEnv` of a registered environment; mirrors ``gymnasium.make_vec``.

    Args:
        id: Id, spec, or a class or function that makes an environment.
        num_envs: How many environments. A vector entry point may make another number where this is 1, the default.
        vectorization_mode: ``"vector_entry_point"`` makes native sub-batches, one for each worker, by the vector entry
            point that the environment is registered with. Every other value makes single environments.
        vector_kwargs: Arguments of :class:`RayVecEnv`.
        wrappers: Applied to each environment in order.
        **kwargs: Arguments of :class:`RayVecEnv`, by their names; all others are passed to the environment.

    >>> envs = make_vec("CartPole-v1", num_envs=4, workers_per_node=1, sutton_barto_reward=True)
    >>> envs
    RayVecEnv(CartPole-v1, num_envs=4)
    >>> envs.close()
    """
    mode = vectorization_mode.value if isinstance(vectorization_mode, VectorizeMode) else vectorization_mode
    check_choice("vectorization_mode", mode, (None, *(each.value for each in VectorizeMode)))
    ours = {name: kwargs.pop(name) for name in list(kwargs) if name in _KEYWORDS} | dict(vector_kwargs or {})
    env_kwargs = {**ours.pop("env_kwargs", {}), **kwargs}
    if mode != _NATIVE:
        return RayVecEnv(id, num_envs, env_kwargs=env_kwargs, wrappers=wrappers or (), **ours)
    if not isinstance(id, str | EnvSpec):
        raise ConfigError(
            f"vectorization_mode={_NATIVE!r} was passed with {repr(id)[:200]}. It requires an id or an EnvSpec. "
            "For makers of vector environments, use RayVecEnv(..., native=True)."
        )
    spec = spec_of(id) if isinstance(id, str) else id
    make: Any = partial(gymnasium.make_vec, id, vectorization_mode=_NATIVE, **env_kwargs)
    sizes = sub_batch_sizes(num_envs, ours.get("num_nodes"), ours.get("workers_per_node"))
    fns = [partial(make, num_envs=size) for size in sizes]
    env = RayVecEnv(fns, None if num_envs == 1 else num_envs, wrappers=wrappers or (), native=True, **ours)
    env.spec = spec
    return env


def sub_batch_sizes(num_envs: int, num_nodes: Any, workers_per_node: int | None) -> list[int]:
    """Returns how many environments each native sub-batch has: one for each worker.

    Where the number of workers is not given, there are as many as this machine has cores.

    >>> sub_batch_sizes(10, num_nodes=1, workers_per_node=4)
    [3, 3, 2, 2]
    """
    check_count("num_envs", num_envs)
    workers = usable_cores() if workers_per_node is None else check_count("workers_per_node", workers_per_node, 0)
    is_range = isinstance(num_nodes, tuple | list)
    nodes = check_node_range(num_nodes)[1] if is_range else check_count("num_nodes", num_nodes or 0, 0)
    bounds = even_bounds(num_envs, min(num_envs, max(1, nodes) * max(1, workers)))
    return [stop - start for start, stop in pairwise(bounds)]


_NATIVE = VectorizeMode.VECTOR_ENTRY_POINT.value
_KEYWORDS = set(inspect.signature(RayVecEnv.__init__).parameters) - {"self", "env", "num_envs", "wrappers", "native"}
