"""The settings of PPO, IMPALA and SAC, and what they have in common."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from rayvec.config.base import TrainConfig
from rayvec.config.schema import Count, Fraction, Name, Natural, NonNegative, Positive, dataclass
from rayvec.errors import require

_POINTS = 101


def _sampled(value: Any) -> Any:
    """Returns the values of a function of the share of a run that is taken; another value as it is."""
    return tuple(float(value(k / (_POINTS - 1))) for k in range(_POINTS)) if callable(value) else value


Values = Annotated[tuple[NonNegative, ...], Field(min_length=2)]
Scheduled = Annotated[NonNegative | Values, BeforeValidator(_sampled)]
PositiveScheduled = Annotated[Positive | Values, BeforeValidator(_sampled)]
Schedule = Literal["linear", "cosine", "constant"]
_A_SHARE = ": each rank computes on some samples of every minibatch"


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(TrainConfig):
    """Settings of an algorithm that trains the default network or your own."""

    num_steps: Count = 32
    """Steps that each environment takes in an iteration."""

    gamma: Fraction = 0.99
    """Discount for each step."""

    network: Name | None = None
    """Function or class that makes your own network, as "module:name". It is called with (observation space, action
    space, settings). Unset: the default network."""

    action_masks: bool = True
    """Choose only among the actions that the environment allows. It allows those of an "action_mask" in its Dict
    observation, where rayvec.wrappers:ActionMask puts that of infos. For Discrete and MultiDiscrete actions, also as
    parts of a Dict or Tuple."""

    normalize_obs: bool = False
    """Normalise observed numbers by their running mean and deviation. They are also clipped to [-10, 10]."""

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates of the weights."""
        return self.num_envs * self.num_steps


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(NetworkConfig):
    """Settings of an algorithm whose network has a policy and a value."""

    learning_rate: PositiveScheduled = 1e-3
    """Step size of the optimizer at the start. In Python also a function of the share of total_steps that is taken;
    settings keep its values at 101 even distances, between which it is interpolated."""

    learning_rate_schedule: Schedule = "linear"
    """How the learning rate falls to 0 over the run: "linear", "cosine", or not at all ("constant")."""

    value_coef: NonNegative = 0.5
    """Weight of the value loss."""

    entropy_coef: Scheduled = 0.01
    """Weight of the entropy bonus; in Python also a function, as for learning_rate."""

    entropy_coef_schedule: Schedule = "constant"
    """As learning_rate_schedule."""

    max_grad_norm: Positive = 0.5
    """Largest global norm of the gradients."""

    normalize_reward: bool = True
    """Divide rewards by the running standard deviation of returns. Returns are discounted, and the divisor is at least
    1 % of their mean; logs show the raw rewards."""

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

    scale_actions: bool = True
    """Act in units in which the bounds of a Box are -1 and 1. Components without finite bounds keep their units."""

    log_std_init: Annotated[float, Field(ge=-20, le=5)] = 0.0
    """Logarithm of the standard deviation of Box actions at the start."""

    recurrent: Literal["gru", "lstm"] | None = None
    """Recurrent cell, for tasks in which one observation is not enough. Actor and critic share it; unset: the policy
    has no memory."""

    recurrent_size: Count = 64
    """Units of the recurrent cell."""

    sequence_length: Count = 16
    """Steps through which gradients flow back in the recurrent cell: chunks are cut into sequences of this length, and
    a minibatch has whole sequences."""

    compile: Literal["auto"] | bool = "auto"
    """Compile each step of the optimizer into one graph, cached on disk and captured on CUDA; without a C++
    compiler a warning says that it runs uncompiled. "auto": on a CPU, where the run is long enough to pay for it,
    which depends on settings and observations alone; your own networks stay uncompiled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recurrent is not None:
            require(
                self.network is None,
                f"recurrent={self.recurrent!r} and network={self.network!r} were passed together. recurrent gives "
                "the default network a memory: leave one of them out.",
            )
            self._at_most("sequence_length", self.num_steps, "num_steps")


@dataclass(frozen=True, kw_only=True)
class PPOConfig(ActorCriticConfig):
    """Proximal policy optimisation (Schulman et al., 2017, arXiv:1707.06347) with a clipped objective.

    Raises:
        ConfigError: A value has the wrong type, is outside its bounds, or contradicts another setting.
    """

    algorithm: ClassVar[str] = "ppo"

    num_steps: Count = 128
    learning_rate: PositiveScheduled = 1e-3
    entropy_coef: Scheduled = 0.0

    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation: 0 trusts the value function, 1 the returns."""

    num_epochs: Count = 10
    """Passes over an iteration's steps."""

    minibatch_size: Count = 256
    """Steps in a minibatch, approximately: the minibatches of an epoch differ by at most one step."""

    clip_coef: PositiveScheduled = 0.2
    """Distance from 1 at which ratios of action probabilities are clipped; in Python also a function, as for
    learning_rate."""

    clip_coef_schedule: Schedule = "constant"
    """As learning_rate_schedule."""

    clip_value_loss: bool = True
    """Clip the change of the value by clip_coef too."""

    normalize_advantage: bool = True
    """Normalise the advantages of each minibatch: mean 0 and standard deviation 1."""

    target_kl: Positive | None = None
    """End the epochs once the approximate KL divergence exceeds this. They are those of an iteration; unset: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_most("minibatch_size", self.steps_per_iteration, "num_envs * num_steps")
        self._at_most("num_learners", self.minibatch_size, "minibatch_size", _A_SHARE)
        least = self.sequence_length * self.num_learners
        require(
            self.recurrent is None or least <= self.minibatch_size,
            f"minibatch_size is {self.minibatch_size}. It must be at least sequence_length * num_learners = {least}.",
        )
        require(
            not self.normalize_advantage or self._smallest_minibatch > 1,
            f"minibatch_size is {self.minibatch_size}, which leaves minibatches of one step: normalised, its advantage "
            "is 0, and the policy learns nothing from it. Raise minibatch_size, or pass normalize_advantage=False.",
        )

    @property
    def _smallest_minibatch(self) -> int:
        """Fewest steps that a minibatch of whole rollouts can have."""
        num_minibatches = max(1, round(self.steps_per_iteration / self.minibatch_size))
        if self.recurrent is None:
            return self.steps_per_iteration // num_minibatches
        num_sequences = self.num_envs * -(-self.num_steps // self.sequence_length)
        shortest = (self.num_steps - 1) % self.sequence_length + 1
        return shortest * max(1, num_sequences // num_minibatches)

    @property
    def minibatches(self) -> tuple[int, int]:
        """How many minibatches the run has, and about how many rows each has."""
        in_epoch = max(1, round(self.steps_per_iteration / self.minibatch_size))
        return self.num_iterations * self.num_epochs * in_epoch, self.minibatch_size


@dataclass(frozen=True, kw_only=True)
class IMPALAConfig(ActorCriticConfig):
    """Importance-weighted actor-learner (Espeholt et al., 2018, arXiv:1802.01561): V-trace on steps of older weights.

    Raises:
        ConfigError: A value has the wrong type, is outside its bounds, or contradicts another setting.
    """

    algorithm: ClassVar[str] = "impala"

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
        require(
            not self.prefetch or self.learner_mode != "decentralized",
            "prefetch=True was passed with learners='decentralized', whose ranks collect with the newest "
            "weights. Leave prefetch out.",
        )
        require(
            self.max_staleness is None or (self.prefetch is not False and self.learner_mode == "driver"),
            f"max_staleness was passed with learners={self.learner_mode!r} and prefetch={self.prefetch}. It "
            "requires learners='driver', and prefetch unset or True.",
        )
        self._at_most("num_minibatches", self.num_envs, "num_envs")

    @property
    def collects_ahead(self) -> bool:
        """Whether the next chunk is collected while the learner learns from this one, with weights one update old."""
        return self.learner_mode != "decentralized" if self.prefetch is None else self.prefetch

    @property
    def minibatches(self) -> tuple[int, int]:
        """How many minibatches the run has, and about how many rows each has."""
        return self.num_iterations * self.num_minibatches, self.steps_per_iteration // self.num_minibatches


@dataclass(frozen=True, kw_only=True)
class SACConfig(NetworkConfig):
    """Soft actor-critic (Haarnoja et al., 2018, arXiv:1812.05905), for Discrete actions arXiv:1910.07207.

    Raises:
        ConfigError: A value has the wrong type, is outside its bounds, or contradicts another setting.
    """

    algorithm: ClassVar[str] = "sac"
    log_interval_steps: ClassVar[int] = 1_000

    env_id: Name = "Pendulum-v1"
    num_envs: Count = 4
    num_steps: Count = 4
    checkpoint_interval_s: NonNegative = 30.0

    learning_starts: Natural = 1_000
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

    policy_lr: PositiveScheduled = 3e-4
    """Step size of Adam for the actor; in Python also a function, as learning_rate of PPO."""

    policy_lr_schedule: Schedule = "constant"
    """How it falls to 0 over the run: "linear", "cosine", or not at all ("constant")."""

    q_lr: PositiveScheduled = 1e-3
    """As policy_lr, for the critics and the temperature."""

    q_lr_schedule: Schedule = "constant"
    """As policy_lr_schedule."""

    alpha: Positive = 1.0
    """Temperature at the start, or always without autotune."""

    autotune: bool = True
    """Adjust the temperature so that the entropy of the policy approaches the target entropy."""

    target_entropy: float | None = None
    """Target entropy in nats; unset: -C for a Box of C numbers scaled to [-1, 1], half of the largest
    possible entropy for Discrete."""

    policy_interval: Count = 2
    """Updates of the critics between two updates of the actor, which then takes as many steps at once."""

    num_critics: Count = 2
    """Number of critics; targets use the smallest of their values."""

    hidden_sizes: tuple[Count, ...] = (256, 256)
    """Units in each hidden layer of the actor and the critics."""

    compile: Literal["auto"] | bool = "auto"
    """Compile each update into one graph, cached on disk and captured on CUDA; without a C++
    compiler a warning says that it runs uncompiled. "auto": on a CPU, where the run is long enough to pay for it,
    which depends on settings and observations alone; your own networks stay uncompiled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_most("batch_size", self.replay_size, "replay_size")
        self._at_most("num_learners", self.batch_size, "batch_size", _A_SHARE)
        require(
            self.learning_starts < self.total_steps,
            f"learning_starts is {self.learning_starts}. It must be below total_steps = {self.total_steps}.",
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
