"""The settings of IMPALA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayvec.config.base import Count, Fraction, Positive
from rayvec.config.network import ActorCriticConfig
from rayvec.errors import ConfigError

__all__ = ["IMPALAConfig"]


@dataclass(frozen=True, kw_only=True)
class IMPALAConfig(ActorCriticConfig):
    """Importance-weighted actor-learner (Espeholt et al., 2018, arXiv:1802.01561): V-trace on steps of older weights.

    Raises:
        ConfigError: A value has the wrong type, is outside its bounds, or contradicts another setting.
    """

    algorithm: ClassVar[str] = "impala"

    normalize_reward: bool = True

    prefetch: bool | None = None
    """Collect the next iteration's steps while the learner learns from these, with weights one update old, if inference
    is "worker". Unset: yes, except with decentralized ranks, which don't."""

    max_staleness: Count | None = None
    """Collect asynchronously: each worker (on a cluster, each node) delivers its chunks when they are ready, and an
    update uses those that are there, which are at most this many updates old. A slow worker delays updates only where
    its chunk would become older. 1: each update waits for one chunk of every worker. It takes effect if inference is
    "worker". Unset: all environments together, see prefetch."""

    num_minibatches: Count = 4
    """Updates in an iteration, each from all steps of an approximately equal share of the environments."""

    vtrace_lambda: Fraction = 1.0
    """Lambda of the traces: 0 trusts the value function, 1 the returns."""

    rho_bar: Positive = 1.0
    """Upper limit of the importance weights of TD errors and advantages."""

    c_bar: Positive = 1.0
    """Upper limit of the importance weights of the traces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefetch and self.learner_mode == "decentralized":
            raise ConfigError(
                "prefetch=True was passed with learners='decentralized', whose ranks collect with the newest "
                "weights. Leave prefetch out."
            )
        if self.max_staleness is not None and (self.prefetch is False or self.learner_mode != "driver"):
            raise ConfigError(
                f"max_staleness was passed with learners={self.learner_mode!r} and prefetch={self.prefetch}. It "
                "requires learners='driver', and prefetch unset or True."
            )
        if self.num_minibatches > self.num_envs:
            raise ConfigError(
                f"num_minibatches is {self.num_minibatches}. It must be at most num_envs = {self.num_envs}."
            )

    @property
    def collects_ahead(self) -> bool:
        """Whether the next chunk is collected while the learner learns from this one, with weights one update old."""
        return self.learner_mode != "decentralized" if self.prefetch is None else self.prefetch

    @property
    def minibatches(self) -> tuple[int, int]:
        """How many minibatches the run has, and about how many rows each has."""
        return self.num_iterations * self.num_minibatches, self.steps_per_iteration // self.num_minibatches
