"""The settings of IMPALA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rayvec.config.base import Count, Fraction, NonNegative, Positive, TrainConfig
from rayvec.errors import ConfigError

__all__ = ["IMPALAConfig"]


@dataclass(frozen=True, kw_only=True)
class IMPALAConfig(TrainConfig):
    """Importance-weighted actor-learner (Espeholt et al., 2018, arXiv:1802.01561): V-trace on steps of older weights.

    Raises:
        ConfigError: A value of the wrong type, outside its bounds, or at odds with another.
    """

    algorithm: ClassVar[str] = "impala"

    total_steps: Count = 300_000
    """Environment steps to train for, rounded up to whole iterations."""

    num_steps: Count = 32
    """Steps that each environment takes in an iteration."""

    prefetch: bool = True
    """Collect the next iteration's steps while the learner learns from these: with weights one update old. Only where
    the policy acts in the workers; with inference "driver" the newest weights act."""

    num_minibatches: Count = 4
    """Updates from an iteration's steps, each from all steps of as many environments as the others, about."""

    optimizer: Literal["adam", "rmsprop"] = "adam"
    """What turns gradients into steps."""

    optimizer_eps: Positive = 1e-5
    """Added to the denominator of the optimizer's step; the paper's RMSProp has 0.1."""

    learning_rate: Positive = 1e-3
    """Step size of the optimizer at the start."""

    anneal_lr: bool = True
    """Lower the learning rate linearly to 0 over the run."""

    gamma: Fraction = 0.99
    """Discount for each step."""

    vtrace_lambda: Fraction = 1.0
    """Lambda of the traces: 0 trusts the value function, 1 the returns."""

    rho_bar: Positive = 1.0
    """Where importance weights of TD errors and advantages are cut off."""

    c_bar: Positive = 1.0
    """Where importance weights of the traces are cut off."""

    value_coef: NonNegative = 0.5
    """Weight of the value loss."""

    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""

    max_grad_norm: Positive = 0.5
    """Global norm that gradients are clipped to."""

    normalize_reward: bool = True
    """Learn from rewards over the running standard deviation of discounted returns; logs keep the raw ones."""

    clip_reward: Positive | None = None
    """Learn from rewards cut off at this size, after normalisation; unset: never."""

    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Units in each hidden layer of the policy's and of the value's net; images alone have none after their own."""

    shared_trunk: bool = False
    """Let policy and value share the hidden layers; those that see images are always shared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_minibatches > self.num_envs:
            raise ConfigError(
                "A minibatch has at least one environment.",
                expected=f"num_minibatches at most num_envs = {self.num_envs}",
                got=self.num_minibatches,
                remedy="Lower num_minibatches, or raise num_envs.",
            )

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates of the weights."""
        return self.num_envs * self.num_steps
