"""The settings of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayvec.config.base import Count, Fraction, Positive, check_ranks
from rayvec.config.network import ActorCriticConfig
from rayvec.errors import ConfigError

__all__ = ["PPOConfig"]


@dataclass(frozen=True, kw_only=True)
class PPOConfig(ActorCriticConfig):
    """Proximal policy optimisation (Schulman et al., 2017, arXiv:1707.06347) with a clipped objective.

    Raises:
        ConfigError: A value has the wrong type, is outside its bounds, or contradicts another setting.
    """

    algorithm: ClassVar[str] = "ppo"

    num_steps: Count = 128
    learning_rate: Positive = 2.5e-4

    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation: 0 trusts the value function, 1 the returns."""

    num_epochs: Count = 4
    """Passes over an iteration's steps."""

    minibatch_size: Count = 256
    """Steps in a minibatch, approximately: the minibatches of an epoch differ by at most one step."""

    clip_coef: Positive = 0.2
    """How far the ratio of action probabilities may move from 1 before its gradient is clipped."""

    clip_value_loss: bool = True
    """Clip the change of the value by clip_coef too."""

    normalize_advantage: bool = True
    """Normalise the advantages of each minibatch to mean 0 and standard deviation 1."""

    target_kl: Positive | None = None
    """End the epochs of an iteration once the approximate KL divergence exceeds this; unset: never."""

    normalize_obs: bool = False
    """Normalise observed numbers by their running mean and standard deviation, and clip them to ±10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minibatch_size > self.steps_per_iteration:
            raise ConfigError(
                f"minibatch_size is {self.minibatch_size}. It must be at most num_envs * num_steps = "
                f"{self.steps_per_iteration}."
            )
        check_ranks(self, "minibatch_size")
        least = self.sequence_length * self.num_learners
        if self.recurrent is not None and least > self.minibatch_size:
            raise ConfigError(
                f"minibatch_size is {self.minibatch_size}. It must be at least sequence_length * num_learners = "
                f"{least}."
            )

    @property
    def minibatches(self) -> tuple[int, int]:
        """How many minibatches the run has, and about how many rows each has."""
        in_epoch = max(1, round(self.steps_per_iteration / self.minibatch_size))
        return self.num_iterations * self.num_epochs * in_epoch, self.minibatch_size
