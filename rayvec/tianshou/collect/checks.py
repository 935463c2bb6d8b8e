"""What a Tianshou collector checks about its policy and environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from tianshou.algorithm.algorithm_base import Algorithm, Policy
from tianshou.data import Collector, CollectStats
from tianshou.env import BaseVectorEnv, VectorEnvWrapper

from rayvec.errors import ConfigError
from rayvec.tianshou.env.vector_env import RayVectorEnv

__all__ = [
    "are_equal",
    "can_take_chunks",
    "check_policy_and_env",
    "looks_at_episodes",
    "looks_at_steps",
    "uses_of",
]


def uses_of(env: BaseVectorEnv) -> int:
    """Returns how often anything has reset or stepped environments, also wrapped ones; 0 where they do not count it."""
    while isinstance(env, VectorEnvWrapper):
        env = env.venv
    return getattr(env, "num_uses", 0)


def looks_at_steps(collector: Collector[Any]) -> bool:
    """Whether a hook, a stats class or a method of a subclass is called with every step."""
    return (
        collector.get_on_step_hook() is not None
        or _overrides(collector, Collector, "run_on_step_hook", "_compute_action_policy_hidden")
        or collector.collect_stats_class.update_at_step_batch is not CollectStats.update_at_step_batch
    )


def looks_at_episodes(collector: Collector[Any]) -> bool:
    """Whether a hook, a stats class or a method of a subclass is called with every whole episode."""
    return (
        collector.get_on_episode_done_hook() is not None
        or _overrides(collector, Collector, "run_on_episode_done")
        or collector.collect_stats_class.update_at_episode_done is not CollectStats.update_at_episode_done
    )


def can_take_chunks(env: Any) -> bool:
    """Whether chunks of environments are what their `step` and `reset` would return."""
    return isinstance(env, RayVectorEnv) and not env.is_async and not _overrides(env, RayVectorEnv, "step", "reset")


def are_equal(spaces: Sequence[gymnasium.Space[Any]]) -> bool:
    """Whether spaces are equal; those of a class that does not define equality are if they are of one class."""
    first = spaces[0]
    by_class = type(first).__eq__ is object.__eq__
    return all(space == first or (by_class and type(space) is type(first)) for space in spaces)


def check_policy_and_env(policy: Any, env: Any) -> None:
    """Refuses policies and environments of other libraries.

    Raises:
        ConfigError: One of them is of another library.
    """
    if not isinstance(policy, Policy | Algorithm):
        raise ConfigError(
            "Collector needs a Tianshou 2 policy.",
            expected="a tianshou.algorithm.algorithm_base.Policy, or an Algorithm",
            got=type(policy).__name__,
            remedy="Put a network into a policy, for example DiscreteActorPolicy(actor=net, action_space=space).",
        )
    if env is None or (isinstance(env, gymnasium.vector.VectorEnv) and not hasattr(type(env), "__len__")):
        raise ConfigError(
            "A collector of Tianshou steps vector environments of Tianshou.",
            expected="rayvec.tianshou.RayVectorEnv, another tianshou.env.BaseVectorEnv, or one gymnasium.Env",
            got=type(env).__name__,
            remedy="Pass rayvec.tianshou.RayVectorEnv(env_fns); rayvec.Collector takes a RayVecEnv.",
        )


def _overrides(owner: object, base: type, *names: str) -> bool:
    """Whether the class of an object, or the object itself, has another method in place of one of `base`."""
    return any(getattr(getattr(owner, name), "__func__", None) is not getattr(base, name) for name in names)
