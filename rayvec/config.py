"""Settings of a run: frozen dataclasses that the command line, the YAML file and the docs derive from.

A field's docstring is the literal below it, its bounds stand in its type (see `rayvec.fields`), and
nothing repeats either: ``rayvec train`` reads them by tyro, `TrainConfig.to_yaml` writes them as
comments, and the table in the documentation is made of them.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import yaml

from rayvec.errors import ConfigError, message
from rayvec.fields import Bounds, check, describe, field_names, plain

__all__ = ["ADJUSTABLE", "CONFIGS", "IMPALAConfig", "PPOConfig", "SACConfig", "TrainConfig"]


Count = Annotated[int, Bounds(1)]
NonNegative = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, above=True)]
Fraction = Annotated[float, Bounds(0, 1)]
Scalar = bool | int | float | str

ADJUSTABLE = (
    "num_nodes",
    "workers_per_node",
    "address",
    "inference",
    "num_learners",
    "learners_apart",
    "learner_device",
    "learner_threads",
    "checkpoint_interval_s",
)
"""Settings that say where and how fast a run goes, not what it learns: resuming and evaluating may change them.

`inference` does one thing more in a run with `prefetch`: where the driver acts nothing is collected ahead, so that from
there on the weights that act are not one update old.
"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every run has, whatever it learns by.

    Raises:
        ConfigError: A value of the wrong type, outside its bounds, or at odds with another.
    """

    algorithm: ClassVar[str] = ""

    env_id: str = "CartPole-v1"
    """Gymnasium id of the environment, with its module where importing that registers it: "module:Name-v0"."""

    env_kwargs: dict[str, Scalar] = field(default_factory=dict)
    """Keyword arguments for the environment's constructor."""

    wrappers: tuple[str, ...] = ()
    """Functions that wrap each environment on its worker, in order, each as "module:function"."""

    total_steps: Count = 100_000
    """Environment steps to train for, rounded up to whole iterations."""

    num_envs: Count = 16
    """Environments that are stepped side by side."""

    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 1
    """Decides initial weights, exploration, minibatches and the seeds of the environments."""

    run_dir: Path | None = None
    """Directory of the run, which must not exist yet; unset: runs/<environment>-<algorithm>-seed<seed>-<time>."""

    num_nodes: Count | None = None
    """Ray nodes to spread the environments over; unset: decided by the cluster's resources."""

    workers_per_node: Count | None = None
    """Worker processes on each node; unset: decided by the node's cores."""

    address: str | None = None
    """Address of a running Ray cluster; unset: RAY_ADDRESS, or else a private cluster on this machine."""

    inference: Literal["worker", "driver"] = "worker"
    """Where the policy acts: in the worker processes (chunks come back) or in the driver (every step comes back, and
    nothing is collected ahead)."""

    num_learners: Count = 1
    """Ranks that compute each update together; 1: the driver itself computes it."""

    learners_apart: bool = False
    """Put the learner's ranks, also a single one, on nodes where no environments step."""

    learner_device: Literal["cpu", "cuda"] = "cpu"
    """Where updates are computed; with several ranks each has a GPU of its own."""

    learner_threads: Count = 1
    """Threads that a rank's update computes with; small nets gain nothing from a second, which waits for a core."""

    eval_episodes: Annotated[int, Bounds(0)] = 100
    """Episodes of the greedy evaluation after training; 0 leaves it out."""

    checkpoint_interval_s: NonNegative = 5.0
    """Seconds of training between checkpoints; 0 saves one after every iteration."""

    def __post_init__(self) -> None:
        check(self)
        if not self.env_id:
            raise ConfigError(
                message(
                    "env_id names the environment.",
                    expected="an id that Gymnasium knows",
                    got="an empty string",
                    remedy='Pass one, for example env_id="CartPole-v1".',
                )
            )

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates of the weights."""
        raise NotImplementedError

    @property
    def prefetch(self) -> bool:
        """Whether the next chunk is collected while the learner learns from this one: with weights one update old.

        With ``inference="driver"`` it is not, whatever this says.
        """
        return False

    @property
    def random_steps(self) -> int:
        """Environment steps at the beginning that are taken at random, before any weights are published."""
        return 0

    @property
    def num_iterations(self) -> int:
        """How many iterations the run has."""
        return math.ceil(self.total_steps / self.steps_per_iteration)

    def train_seed(self, steps: int) -> int:
        """Returns the seed of the episodes begun after `steps` steps; environment i adds i to it.

        A run that is resumed does not see its first episodes again. The result lies in [0, 2^30 - 2^20).
        """
        return _derived_seed(self.seed, steps)

    def eval_seed(self) -> int:
        """Returns the first seed of evaluation: 2^30 above where training's can lie, so that they never meet."""
        return 2**30 + _derived_seed(self.seed, 0)

    def adjusted(self, **changes: Any) -> TrainConfig:
        """Returns the same run in another place or at another pace.

        Args:
            changes: Some of the settings in `ADJUSTABLE`.

        Raises:
            ConfigError: A setting that decides what is learned.
        """
        fixed = [name for name, value in changes.items() if name not in ADJUSTABLE and value != getattr(self, name)]
        if fixed:
            raise ConfigError(
                message(
                    "A run keeps the settings that it began with, but for where and how fast it goes.",
                    expected=f"only changes of {', '.join(ADJUSTABLE)}",
                    got=", ".join(f"{name}={changes[name]!r} after {getattr(self, name)!r}" for name in fixed),
                    remedy="Leave these out, or start a new run.",
                )
            )
        return replace(self, **changes)

    def to_yaml(self) -> str:
        """Returns the settings as commented YAML that `from_yaml` reads back to an equal object."""
        parts = [f"algorithm: {self.algorithm}\n"]
        values = plain(self)
        for row in describe(type(self)):
            comment = "\n".join(textwrap.wrap(row.doc, 116, initial_indent="# ", subsequent_indent="# "))
            parts.append(f"{comment}\n{yaml.safe_dump({row.name: values[row.name]})}")
        return "\n".join(parts)

    @staticmethod
    def from_yaml(text: str) -> TrainConfig:
        """Returns the settings that `to_yaml` wrote, as the class that their ``algorithm`` names.

        Raises:
            ConfigError: Not a mapping, an unknown algorithm or setting, or a value that can't work.
        """
        try:
            settings = yaml.safe_load(text)
        except yaml.YAMLError as error:
            settings = f"no YAML ({' '.join(str(error).split())})"
        return TrainConfig.from_plain(settings)

    def to_plain(self) -> dict[str, Any]:
        """Returns the settings as strings, numbers, lists and dicts, ``algorithm`` among them."""
        return {"algorithm": self.algorithm, **plain(self)}

    @staticmethod
    def from_plain(settings: object) -> TrainConfig:
        """Returns the settings that `to_plain` described.

        Raises:
            ConfigError: Not a mapping, an unknown algorithm or setting, or a value that can't work.
        """
        if not isinstance(settings, dict) or settings.get("algorithm") not in CONFIGS:
            raise ConfigError(
                message(
                    "Settings are a mapping that names its algorithm.",
                    expected=f"algorithm: one of {', '.join(CONFIGS)}",
                    got=settings.get("algorithm") if isinstance(settings, dict) else settings,
                    remedy="Use the config.yaml of a run, or write one with TrainConfig.to_yaml().",
                )
            )
        cls = CONFIGS[settings["algorithm"]]
        values = {name: value for name, value in settings.items() if name != "algorithm"}
        unknown = sorted(map(str, values.keys() - set(field_names(cls))))
        if unknown:
            raise ConfigError(
                message(
                    f"{cls.__name__} has a closed list of settings.",
                    expected=", ".join(field_names(cls)),
                    got=", ".join(unknown),
                    remedy="Correct the name or leave it out.",
                )
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class PPOConfig(TrainConfig):
    """Proximal policy optimisation (Schulman et al., 2017, arXiv:1707.06347) with a clipped objective.

    Raises:
        ConfigError: A value of the wrong type, outside its bounds, or at odds with another.
    """

    algorithm: ClassVar[str] = "ppo"

    num_steps: Count = 64
    """Steps that each environment takes in an iteration."""

    learning_rate: Positive = 2.5e-3
    """Step size of Adam at the start."""

    anneal_lr: bool = True
    """Lower the learning rate linearly to 0 over the run."""

    gamma: Fraction = 0.98
    """Discount for each step."""

    gae_lambda: Fraction = 0.9
    """Lambda of generalised advantage estimation: 0 trusts the value function, 1 the returns."""

    num_epochs: Count = 8
    """Passes over an iteration's steps."""

    minibatch_size: Count = 256
    """Steps in a minibatch, about: those of an epoch differ by at most one step."""

    clip_coef: Positive = 0.2
    """How far the ratio of action probabilities may move from 1 before its gradient is cut."""

    clip_value_loss: bool = False
    """Clip the value's change by clip_coef too."""

    value_coef: NonNegative = 0.5
    """Weight of the value loss."""

    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""

    max_grad_norm: Positive = 0.5
    """Global norm that gradients are clipped to."""

    normalize_advantage: bool = True
    """Give the advantages of each minibatch mean 0 and standard deviation 1."""

    target_kl: Positive | None = None
    """End an iteration's epochs once the approximate KL divergence passes this; unset: never."""

    normalize_obs: bool = False
    """Shift and scale observed numbers by their running mean and standard deviation, and clip them to ±10."""

    normalize_reward: bool = False
    """Learn from rewards over the running standard deviation of discounted returns; logs keep the raw ones."""

    clip_reward: Positive | None = None
    """Learn from rewards cut off at this size, after normalisation; unset: never."""

    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Units in each hidden layer of the policy's and of the value's net; images alone have none after their own."""

    shared_trunk: bool = False
    """Let policy and value share the hidden layers; those that see images are always shared."""

    compile: bool = False
    """Compile loss and gradient into one graph, kept on disk between runs; pays for long runs of small nets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minibatch_size > self.steps_per_iteration:
            raise ConfigError(
                message(
                    "A minibatch is part of one iteration.",
                    expected=f"minibatch_size at most num_envs * num_steps = {self.steps_per_iteration}",
                    got=self.minibatch_size,
                    remedy="Lower minibatch_size, or raise num_envs or num_steps.",
                )
            )
        _check_ranks(self, "minibatch_size")

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates of the weights."""
        return self.num_envs * self.num_steps


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
                message(
                    "A minibatch has at least one environment.",
                    expected=f"num_minibatches at most num_envs = {self.num_envs}",
                    got=self.num_minibatches,
                    remedy="Lower num_minibatches, or raise num_envs.",
                )
            )

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates of the weights."""
        return self.num_envs * self.num_steps


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
                message(
                    "A minibatch is drawn from the replay.",
                    expected=f"batch_size at most replay_size = {self.replay_size}",
                    got=self.batch_size,
                    remedy="Lower batch_size, or raise replay_size.",
                )
            )
        _check_ranks(self, "batch_size")
        if self.learning_starts >= self.total_steps:
            raise ConfigError(
                message(
                    "Learning starts within the run.",
                    expected=f"learning_starts below total_steps = {self.total_steps}",
                    got=self.learning_starts,
                    remedy="Lower learning_starts, or raise total_steps.",
                )
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


CONFIGS: dict[str, type[TrainConfig]] = {cls.algorithm: cls for cls in (PPOConfig, SACConfig, IMPALAConfig)}
"""Config classes by the name that their algorithm has on the command line."""


def _check_ranks(config: TrainConfig, name: str) -> None:
    """Refuses more ranks than a minibatch has rows; `name` is the setting that says how many it has."""
    num_rows = getattr(config, name)
    if config.num_learners > num_rows:
        raise ConfigError(
            message(
                "Every rank computes on rows of each minibatch.",
                expected=f"num_learners at most {name} = {num_rows}",
                got=config.num_learners,
                remedy=f"Lower num_learners, or raise {name}.",
            )
        )


def _derived_seed(seed: int, steps: int) -> int:
    """Returns a number in [0, 2^30 - 2^20): some environments take no seed beyond 2^31."""
    return int(np.random.SeedSequence([seed, steps]).generate_state(1)[0]) % (2**30 - 2**20)
