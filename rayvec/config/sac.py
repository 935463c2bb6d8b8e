"""The settings of SAC."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rayvec.config.base import Count, Fraction, NonNegative, Positive, check_ranks
from rayvec.config.network import NetworkConfig
from rayvec.config.schema import Bounds
from rayvec.errors import ConfigError

__all__ = ["SACConfig"]


@dataclass(frozen=True, kw_only=True)
class SACConfig(NetworkConfig):
    """Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), for Discrete actions arXiv:1910.07207.

    Raises:
        ConfigError: A value has the wrong type, is outside its bounds, or contradicts another setting.
    """

    algorithm: ClassVar[str] = "sac"

    env_id: str = "Pendulum-v1"
    num_envs: Count = 4
    num_steps: Count = 4
    checkpoint_interval_s: NonNegative = 30.0
    log_interval_steps: Count = 1_000

    learning_starts: Annotated[int, Bounds(0)] = 1_000
    """Random steps before the first update."""

    update_to_data: Positive = 1.0
    """Updates for each environment step after learning_starts; the ratio is exact over the run."""

    replay_size: Count = 1_000_000
    """Capacity of the replay buffer in steps, for all environments together."""

    replay_on_device: bool = False
    """Keep the replay buffer in the memory of learner_device. Updates then upload row numbers in place of steps."""

    checkpoint_replay: bool = True
    """Keep the replay buffer in checkpoints. Without it, or on another number of learners, a resumed run refills the
    buffer."""

    batch_size: Count = 256
    """Steps in a minibatch."""

    tau: Fraction = 0.005
    """Share of the critics that is mixed into the target critics at every update."""

    policy_lr: Positive = 3e-4
    """Step size of Adam for the actor."""

    q_lr: Positive = 1e-3
    """Step size of Adam for the critics."""

    alpha_lr: Positive | None = None
    """Step size of Adam for the temperature; unset: q_lr."""

    alpha: Positive = 1.0
    """Temperature at the start, or always without autotune."""

    autotune: bool = True
    """Adjust the temperature so that the entropy of the policy approaches the target entropy."""

    target_entropy: Annotated[float, Bounds(-math.inf)] | None = None
    """Target entropy in nats; unset: -C for a Box of C numbers scaled to [-1, 1], target_entropy_scale for Discrete."""

    target_entropy_scale: Fraction = 0.5
    """Target entropy of Discrete actions, as a share of the largest possible entropy."""

    policy_interval: Count = 2
    """Updates of the critics between two updates of the actor, which then takes as many steps at once."""

    num_critics: Count = 2
    """Number of critics; targets use the smallest of their values."""

    hidden_sizes: tuple[Count, ...] = (256, 256)
    """Units in each hidden layer of the actor and the critics."""

    compile: Literal["auto", True, False] = "auto"
    """Compile each update into one graph, cached on disk and captured on CUDA; without a C++
    compiler a warning says that it runs uncompiled. "auto": on a CPU, where the run is long enough to pay for it,
    which depends on settings and observations alone; your own networks stay uncompiled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.replay_size:
            raise ConfigError(f"batch_size is {self.batch_size}. It must be at most replay_size = {self.replay_size}.")
        check_ranks(self, "batch_size")
        if self.learning_starts >= self.total_steps:
            raise ConfigError(
                f"learning_starts is {self.learning_starts}. It must be below total_steps = {self.total_steps}."
            )

    @property
    def minibatches(self) -> tuple[int, int]:
        """How many minibatches the run has, and how many rows each has."""
        return math.floor(self.update_to_data * (self.total_steps - self.learning_starts)), self.batch_size

    @property
    def random_steps(self) -> int:
        """Environment steps at the beginning that are random."""
        return self.learning_starts

    @property
    def collects_ahead(self) -> bool:
        """Whether environments step while the learner learns; it takes effect only with ``inference="worker"``."""
        return self.learner_mode != "decentralized"
