"""What the settings of algorithms that train networks have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rayvec.config.base import Count, Fraction, NonNegative, Positive, TrainConfig
from rayvec.config.schema import Bounds
from rayvec.errors import ConfigError

__all__ = ["ActorCriticConfig", "NetworkConfig"]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(TrainConfig):
    """Settings of an algorithm that trains the default network or your own."""

    num_steps: Count = 32
    """Steps that each environment takes in an iteration."""

    gamma: Fraction = 0.99
    """Discount for each step."""

    network: str | None = None
    """Function or class, called with (observation space, action space, settings), that makes the network to train, as
    "module:name"; unset: the default network."""

    action_masks: bool = True
    """Choose only among the actions that the environment allows: where infos or a Dict observation have an
    "action_mask" for a Discrete or MultiDiscrete action space."""

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates of the weights."""
        return self.num_envs * self.num_steps


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(NetworkConfig):
    """Settings of an algorithm whose network has a policy and a value."""

    learning_rate: Positive = 1e-3
    """Step size of the optimizer at the start."""

    anneal_lr: bool = True
    """Lower the learning rate linearly to 0 over the run."""

    value_coef: NonNegative = 0.5
    """Weight of the value loss."""

    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""

    max_grad_norm: Positive = 0.5
    """Largest global norm of the gradients."""

    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of discounted returns, but by no less than 1 % of their mean;
    logs show the raw rewards."""

    clip_reward: Positive | None = None
    """Clip rewards to plus or minus this, after normalisation; unset: no clipping."""

    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Units in each hidden layer of the policy and the value network; unused where the observation is one image."""

    shared_trunk: bool = False
    """Share the hidden layers between policy and value; convolutional layers are always shared, and so is everything
    before a recurrent cell."""

    activation: Literal["tanh", "relu", "elu", "gelu"] = "tanh"
    """Function after each hidden layer of the default network; convolutional layers always have ReLU."""

    layer_norm: bool = False
    """Normalise each hidden layer of the default network (LayerNorm) before its activation."""

    cnn: Literal["nature", "impala"] = "nature"
    """How the default network reads images: "nature" (three convolutions; three small ones below 36 pixels), or
    "impala" (residual blocks)."""

    log_std_init: Annotated[float, Bounds(-20, 5)] = 0.0
    """Logarithm of the standard deviation of Box actions at the start."""

    recurrent: Literal["gru", "lstm"] | None = None
    """Recurrent cell that actor and critic share, for tasks in which one observation does not tell enough; unset: the
    policy has no memory."""

    recurrent_size: Count = 64
    """Units of the recurrent cell."""

    sequence_length: Count = 16
    """Steps through which gradients flow back in the recurrent cell: chunks are cut into sequences of this length, and
    a minibatch has whole sequences."""

    burn_in: Annotated[int, Bounds(0)] = 0
    """Steps before each sequence, without gradients, that bring its recorded hidden state up to the newest weights; the
    first sequence of a chunk has none."""

    compile: Literal["auto", True, False] = "auto"
    """Compile each step of the optimizer into one graph, cached on disk and captured on CUDA; without a C++
    compiler a warning says that it runs uncompiled. "auto": on a CPU, where the run is long enough to pay for it,
    which depends on settings and observations alone; your own networks stay uncompiled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recurrent is None:
            return
        if self.network is not None:
            raise ConfigError(
                f"recurrent={self.recurrent!r} and network={self.network!r} were passed together. recurrent gives "
                "the default network a memory: leave one of them out."
            )
        if self.sequence_length > self.num_steps:
            raise ConfigError(
                f"sequence_length is {self.sequence_length}. It must be at most num_steps = {self.num_steps}."
            )
        if self.burn_in >= self.sequence_length:
            raise ConfigError(f"burn_in is {self.burn_in}. It must be below sequence_length = {self.sequence_length}.")
