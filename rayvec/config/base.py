"""The settings that every run has, and their way to YAML and back."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import yaml

from rayvec.config.schema import Bounds, check, describe, field_names, plain
from rayvec.errors import ConfigError

__all__ = [
    "ADJUSTABLE",
    "CONFIGS",
    "Count",
    "Fraction",
    "NonNegative",
    "Positive",
    "TrainConfig",
    "check_ranks",
]

Count = Annotated[int, Bounds(1)]
NonNegative = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, above=True)]
Fraction = Annotated[float, Bounds(0, 1)]
Scalar = bool | int | float | str

CONFIGS: dict[str, type[TrainConfig]] = {}
"""Config classes by the name that their algorithm has on the command line; the package fills it."""

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

    num_nodes: Annotated[int, Bounds(0)] | None = None
    """Ray nodes to spread the environments over; 0: this machine, without Ray. Unset: all nodes with free cores if Ray
    is initialised, an address is given or the learner has ranks; else 0."""

    workers_per_node: Annotated[int, Bounds(0)] | None = None
    """Worker processes on each node; unset: one for each core. With num_nodes=0, 0 steps in the driver's process."""

    address: str | None = None
    """Address of a running Ray cluster; unset: RAY_ADDRESS, or else, where Ray is needed, a private one."""

    inference: Literal["worker", "driver"] = "worker"
    """Where the policy acts: in the worker processes (chunks come back) or in the driver (every step comes back, and
    nothing is collected ahead)."""

    num_learners: Count = 1
    """Ranks that compute each update together, at most one for each environment; 1: the driver itself computes it."""

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
                "env_id names the environment.",
                expected="an id that Gymnasium knows",
                got="an empty string",
                remedy='Pass one, for example env_id="CartPole-v1".',
            )
        if self.num_learners > self.num_envs:
            raise ConfigError(
                "Every rank learns from environments of its own.",
                expected=f"num_learners at most num_envs = {self.num_envs}",
                got=self.num_learners,
                remedy="Lower num_learners, or raise num_envs.",
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
    def learns_in_driver(self) -> bool:
        """Whether the driver itself computes updates, and not ranks on Ray."""
        return self.num_learners == 1 and not self.learners_apart

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
                "A run keeps the settings that it began with, but for where and how fast it goes.",
                expected=f"only changes of {', '.join(ADJUSTABLE)}",
                got=", ".join(f"{name}={changes[name]!r} after {getattr(self, name)!r}" for name in fixed),
                remedy="Leave these out, or start a new run.",
            )
        if changes.get("num_nodes") == 0:
            changes = {"workers_per_node": None, **changes}  # there are none any more
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
                "Settings are a mapping that names its algorithm.",
                expected=f"algorithm: one of {', '.join(CONFIGS)}",
                got=settings.get("algorithm") if isinstance(settings, dict) else settings,
                remedy="Use the config.yaml of a run, or write one with TrainConfig.to_yaml().",
            )
        cls = CONFIGS[settings["algorithm"]]
        values = {name: value for name, value in settings.items() if name != "algorithm"}
        unknown = sorted(map(str, values.keys() - set(field_names(cls))))
        if unknown:
            raise ConfigError(
                f"{cls.__name__} has a closed list of settings.",
                expected=", ".join(field_names(cls)),
                got=", ".join(unknown),
                remedy="Correct the name or leave it out.",
            )
        return cls(**values)


def check_ranks(config: TrainConfig, name: str) -> None:
    """Refuses more ranks than a minibatch has rows; `name` is the setting that says how many it has."""
    num_rows = getattr(config, name)
    if config.num_learners > num_rows:
        raise ConfigError(
            "Every rank computes on rows of each minibatch.",
            expected=f"num_learners at most {name} = {num_rows}",
            got=config.num_learners,
            remedy=f"Lower num_learners, or raise {name}.",
        )


def _derived_seed(seed: int, steps: int) -> int:
    """Returns a number in [0, 2^30 - 2^20): some environments take no seed beyond 2^31."""
    return int(np.random.SeedSequence([seed, steps]).generate_state(1)[0]) % (2**30 - 2**20)
