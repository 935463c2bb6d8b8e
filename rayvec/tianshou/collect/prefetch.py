"""What `prefetch` and `max_staleness` of Tianshou's collector support, and the statistics that they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tianshou.algorithm.algorithm_base import Algorithm, OnPolicyAlgorithm, Policy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.data import CollectStats

from rayvec.errors import ConfigError
from rayvec.tianshou.collect.checks import can_take_chunks
from rayvec.tianshou.policies import records_logp

__all__ = ["PrefetchCollectStats", "check_prefetch", "prefetch_error"]


@dataclass(kw_only=True)
class PrefetchCollectStats(CollectStats):
    """Statistics of one call of ``collect`` of a prefetching collector."""

    staleness: int = 0
    """How many times the policy had changed after it started to take the oldest of these steps."""

    staleness_counts: tuple[int, ...] = ()
    """With `max_staleness`: with how many of these columns (one chunk of one environment) it had changed 0, 1, 2, ...
    times."""


def check_prefetch(policy: Policy | Algorithm[Any, Any], env: Any, inference: str) -> None:
    """Refuses environments and algorithms that `prefetch` does not support.

    Raises:
        ConfigError: The policy acts in the driver; the environments are asynchronous, not a `RayVectorEnv`, or have a
            `step` or `reset` of their own; or the algorithm learns only from steps of its present policy.
    """
    if inference != "worker" or not can_take_chunks(env):
        raise prefetch_error(
            "inference='worker' and a RayVectorEnv without wait_num and timeout, step and reset not overridden",
            f"{inference}, {env}",
        )
    acting = policy.policy if isinstance(policy, Algorithm) else policy
    on_policy = isinstance(policy, OnPolicyAlgorithm) or isinstance(acting, ProbabilisticActorPolicy)
    if on_policy and not records_logp(acting):
        raise prefetch_error(
            "an off-policy algorithm or rayvec.tianshou.IMPALA",
            f"{type(policy).__name__}, which learns from steps of its present policy",
        )


def prefetch_error(expected: str, got: str, remedy: str = "Leave prefetch and max_staleness out.") -> ConfigError:
    """Returns the error of what `prefetch` does not support."""
    return ConfigError(
        "With `prefetch` and `max_staleness` the workers take chunks with the policy as it was before the update.",
        expected=expected,
        got=got,
        remedy=remedy,
    )
