"""The settings of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from rayvec.config.base import Count, Fraction, NonNegative, Positive, TrainConfig, check_ranks
from rayvec.config.schema import Bounds
from rayvec.errors import ConfigError

__all__ = ["SACConfig"]


@dataclass(frozen=True, kw_only=True)
class SACConfig(TrainConfig):
    """Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), for Discrete actions arXiv:1910.07207.

    Raises:
        ConfigError: A value of the wrong type, outside its bounds, or at odds with another.
    """

    algorithm: ClassVar[str] = "sac"

    env_id: str = "Pendulum-v1"
    """Gymnasium id of the environment, with its module where importing that registers it: "module:Name-v0"."""

    total_steps: Count = 20_000
    """Environment steps to train for, rounded up to whole iterations."""

    num_envs: Count = 4
    """Environments that are stepped side by side."""

    num_steps: Count = 4
    """Steps that each environment takes between two publications of the weights."""

    learning_starts: Annotated[int, Bounds(0)] = 1_000
    """Steps that are taken at random before the first update."""

    update_to_data: Positive = 1.0
    """Updates for each environment step since learning_starts; the ratio is kept exactly over the run."""

    replay_size: Count = 1_000_000
    """Steps that the replay keeps, of all environments together."""

    checkpoint_replay: bool = True
    """Keep the replay in checkpoints to go on exactly, on as many learners; without it, or on others, it refills."""

    checkpoint_interval_s: NonNegative = 30.0
    """Seconds of training between checkpoints; 0 saves one after every iteration."""

    batch_size: Count = 256
    """Steps in a minibatch."""

    gamma: Fraction = 0.99
    """Discount for each step."""

    tau: Fraction = 0.005
    """Share of the critics that goes into the target critics at every update."""

    policy_lr: Positive = 1e-3
    """Step size of Adam for the actor."""

    q_lr: Positive = 1e-3
    """Step size of Adam for the critics."""

    alpha_lr: Positive | None = None
    """Step size of Adam for the temperature; unset: q_lr."""

    alpha: Positive = 1.0
    """Temperature at the start, and for good without autotune."""

    autotune: bool = True
    """Adjust the temperature so that the policy has the target entropy."""

    target_entropy: float | None = None
    """Entropy to aim at, in nats; unset: -C for a Box of C numbers scaled to [-1, 1], or by target_entropy_scale."""

    target_entropy_scale: Fraction = 0.5
    """Share of the largest possible entropy to aim at where actions are Discrete."""

    policy_interval: Count = 1
    """Updates of the critics between two of the actor, which then takes as many steps at once."""

    num_critics: Count = 2
    """Critics, the least of which counts."""

    hidden_sizes: tuple[Count, ...] = (128, 128)
    """Units in each hidden layer of the actor's and of the critics' nets."""

    compile: bool = False
    """Compile the whole update into one graph, kept on disk between runs; on CUDA, capture it too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.replay_size:
            raise ConfigError(
                "A minibatch is drawn from the replay.",
                expected=f"batch_size at most replay_size = {self.replay_size}",
                got=self.batch_size,
                remedy="Lower batch_size, or raise replay_size.",
            )
        check_ranks(self, "batch_size")
        if self.learning_starts >= self.total_steps:
            raise ConfigError(
                "Learning starts within the run.",
                expected=f"learning_starts below total_steps = {self.total_steps}",
                got=self.learning_starts,
                remedy="Lower learning_starts, or raise total_steps.",
            )

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two publications of the weights."""
        return self.num_envs * self.num_steps

    @property
    def random_steps(self) -> int:
        """Environment steps at the beginning that are taken at random."""
        return self.learning_starts

    @property
    def prefetch(self) -> bool:
        """Environments step while the learner learns, unless the policy acts in the driver."""
        return True
