"""What a Tianshou collector requires of its policy, its environments and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from tianshou.algorithm.algorithm_base import Algorithm, OnPolicyAlgorithm, Policy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.data import Collector, CollectStats
from tianshou.env import BaseVectorEnv, VectorEnvWrapper

from rayvec.errors import ConfigError
from rayvec.tianshou.env.vector_env import RayVectorEnv
from rayvec.tianshou.policies import records_logp

__all__ = [
    "are_equal",
    "can_take_chunks",
    "check_learns_off_policy",
    "check_policy_and_env",
    "looks_at_episodes",
    "looks_at_steps",
    "single_steps_error",
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
    is_plain = isinstance(env, RayVectorEnv) and not _overrides(env, RayVectorEnv, "step", "reset")
    return is_plain and not env.is_async and env.gives_arrays


def are_equal(spaces: Sequence[gymnasium.Space[Any]]) -> bool:
    """Whether spaces are equal; those of a class that does not define equality are if they are of one class."""
    first = spaces[0]
    by_class = type(first).__eq__ is object.__eq__
    return all(space == first or (by_class and type(space) is type(first)) for space in spaces)


def check_policy_and_env(policy: Any, env: Any) -> None:
    """Raises ``ConfigError`` if a policy or environments are of another library."""
    if not isinstance(policy, Policy | Algorithm):
        raise ConfigError(
            f"{type(policy).__name__} is not a Tianshou 2 policy or algorithm. Put a network into a policy, for "
            "example DiscreteActorPolicy(actor=net, action_space=space)."
        )
    if env is None or (isinstance(env, gymnasium.vector.VectorEnv) and not hasattr(type(env), "__len__")):
        raise ConfigError(
            f"{type(env).__name__} is not a vector environment of Tianshou. Pass rayvec.tianshou.RayVectorEnv("
            "env_fns), another tianshou.env.BaseVectorEnv or one gymnasium.Env; rayvec.Collector takes a RayVecEnv."
        )


def check_learns_off_policy(policy: Policy | Algorithm[Any, Any]) -> None:
    """Raises ``ConfigError`` if `policy` learns only from steps of its present policy, which are not taken ahead."""
    acting = policy.policy if isinstance(policy, Algorithm) else policy
    on_policy = isinstance(policy, OnPolicyAlgorithm) or isinstance(acting, ProbabilisticActorPolicy)
    if on_policy and not records_logp(acting):
        raise ConfigError(
            f"{type(policy).__name__} learns from steps of its present policy. prefetch and max_staleness take steps "
            "with an earlier one: use an off-policy algorithm or rayvec.tianshou.IMPALA, or leave them out."
        )


def single_steps_error(setting: str) -> ConfigError:
    """Returns the error of a setting that requires chunks, in a collect that takes one step at a time."""
    return ConfigError(
        f"collect would take one step at a time, but {setting} requires chunks: a RayVectorEnv without wait_num and "
        "timeout, step and reset not overridden, observations in arrays, inference='worker', a picklable policy, one "
        f"action space for random=True, no step hook, no rendering, no arguments for resets. Leave {setting} out, or "
        "what requires single steps."
    )


def _overrides(owner: object, base: type, *names: str) -> bool:
    """Whether the class of an object, or the object itself, has another method in place of one of `base`."""
    return any(getattr(getattr(owner, name), "__func__", None) is not getattr(base, name) for name in names)
