"""The settings that every run has, and their conversion to and from YAML."""

from __future__ import annotations

import math
import textwrap
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter, model_validator
from pydantic_core import ArgsKwargs

from rayvec.config.presets import PRESETS, by_preset, with_preset
from rayvec.config.references import import_plugins
from rayvec.config.schema import Count, Name, Natural, NonNegative, Positive, Seed, dataclass, docs_of, field_names
from rayvec.errors import check_node_range, require

Scalar = None | bool | int | Annotated[float, Field(allow_inf_nan=True)] | str
NodeCount = Annotated[
    Natural | tuple[int, int] | None,
    BeforeValidator(lambda value: value.split(":") if isinstance(value, str) and ":" in value else value),
]

CONFIGS: dict[str, type[TrainConfig]] = {}
"""Config classes by the name of their algorithm on the command line."""

ADJUSTABLE = (
    "total_steps",
    "num_nodes",
    "workers_per_node",
    "probe",
    "cores_per_env",
    "gpus_per_env",
    "resources_per_env",
    "address",
    "inference",
    "num_learners",
    "learners",
    "sync_fraction",
    "variable_lengths",
    "learner_device",
    "replay_on_device",
    "precision",
    "learner_threads",
    "checkpoint_interval_s",
    "eval_episodes",
    "eval_interval_steps",
    "eval_max_episode_steps",
    "eval_deterministic",
    "eval_env",
    "eval_env_kwargs",
    "episode_metrics",
    "track",
    "on_env_error",
    "step_timeout_s",
    "start_timeout_s",
    "restart_env_every",
    "replay_calls",
    "spare_envs",
    "on_bad_obs",
    "on_node_loss",
    "groups",
    "preload",
    "env_servers",
)
"""Settings of where, how long and how fast a run executes, not of what it learns. Resuming and evaluating may change
them.

Two have a second effect in a run with `prefetch`: unless ``inference="worker"``, and with ``learners="decentralized"``,
no steps are collected ahead, so the weights that act are the newest ones instead of being one update old. And where
ranks are stopped or lengths vary (`sync_fraction`, `variable_lengths`), it is chance which environment gives how many
steps.
"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings that every run has, whatever its algorithm.

    A setting that is not passed has the value of the preset, if that has one, or else its default.

    Raises:
        ConfigError: A value has the wrong type, is outside its bounds, or contradicts another setting.
    """

    algorithm: ClassVar[str] = ""
    log_interval_steps: ClassVar[int] = 1  # that one line of metrics covers, rounded up to whole iterations

    env_id: Name = "CartPole-v1"
    """Gymnasium id, "module:Name-v0" or "module:Class" of the environment. A module is imported first where it
    registers the id. A class or function of a module makes the environment."""

    preset: Literal["auto", "none", "classic", "box2d", "mujoco", "atari"] = "auto"
    """Settings tuned to a kind of environment, in place of the defaults; settings that you pass override it. "auto": by
    env_id, where a preset is known for it. The defaults shown are those without a preset."""

    native: Name | None = None
    """Function that makes a gymnasium.vector.VectorEnv of the number of environments that it is called with, as
    "module:function". Each worker steps one such native sub-batch, in the place of environments of env_id."""

    env_kwargs: dict[str, Scalar | list[Scalar]] = field(default_factory=dict)
    """Arguments of the environment's constructor, as NAME VALUE pairs. Or of the function that makes it. On the command
    line, '{NAME: [VALUE, ...]}' passes lists."""

    env_servers: dict[Literal["port", "host", "key_file", "command"], Scalar | list[Scalar]] = field(
        default_factory=dict
    )
    """Servers that serve the environments in place of env_id, as NAME VALUE pairs: `port 9000 key_file key` waits for
    num_envs servers that dial in, and `command 'python env_server.py module:Class'` starts them."""

    wrappers: tuple[str, ...] = ()
    """Functions that wrap each environment, each as "module:function". They are called on its worker, in this order."""

    total_steps: Count = 100_000
    """Environment steps to train for, rounded up to whole iterations."""

    num_envs: Count = 16
    """Environments that are stepped in parallel."""

    seed: Seed = 1
    """Seed of the first weights, exploration, minibatches and environments."""

    run_dir: Path | None = None
    """Directory of the run, which must not exist; unset: runs/<environment>-<algorithm>-seed<seed>-<time>."""

    init_from: Path | None = None
    """Directory of a run whose weights training begins with. It has the same network, and its statistics of
    observations are taken too. The optimizer, schedule and counters start from the
    beginning, and SAC takes no random steps."""

    num_nodes: NodeCount = None
    """Ray nodes to spread the environments over; 0: this machine, without Ray. Two numbers (min, max), on the command
    line MIN:MAX: environments move as nodes join and leave. Unset: all nodes with free cores if Ray is initialised, an
    address is given or learners="dedicated"; else 0. With learners="dedicated", set it below the number of nodes."""

    workers_per_node: Natural | None = None
    """Worker processes on each node; unset: one for each core, or for each environment, up to 256, if steps wait. With
    num_nodes=0, 0 steps in the driver's process."""

    probe: bool = True
    """Whether to find out if steps wait, where workers_per_node is unset, by one environment more (at most 0.3 s)."""

    cores_per_env: Positive | None = None
    """Cores that each environment needs: a share of one, or a whole number. Not with learners="decentralized"."""

    gpus_per_env: Positive | None = None
    """GPUs that each environment needs, and alone sees: a share of one, or a whole number. Unset: it sees those of
    CUDA_VISIBLE_DEVICES."""

    resources_per_env: dict[str, Positive] = field(default_factory=dict)
    """Resources of Ray's nodes that each environment claims, as NAME AMOUNT pairs."""

    address: str | None = None
    """Address of a running Ray cluster; unset: RAY_ADDRESS, or else, where Ray is needed, a private one."""

    inference: Literal["worker", "driver", "node"] = "worker"
    """Where the policy acts: in the worker processes, which return chunks; in the process that owns the workers of a
    node, on learner_device, in large batches; or in the driver, which receives every step. The last two collect nothing
    ahead."""

    num_learners: Count = 1
    """Ranks that compute each update together, at most one for each environment. With learners="decentralized" and
    num_nodes=(min, max), it is the number on max nodes; on fewer nodes there are fewer ranks, in proportion."""

    learners: Literal["driver", "shared", "dedicated", "decentralized"] | None = None
    """Where updates are computed: "driver"; "shared": by ranks on the nodes of the environments; "dedicated": by ranks
    on nodes without environments; "decentralized": by ranks that each step their own share of the environments, so that
    no steps pass through the driver (DD-PPO). Unset: "driver" with one learner, "shared" with several."""

    sync_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6
    """With decentralized ranks: once this share of them has taken its steps, the others stop at their next step; 1: no
    rank is stopped."""

    variable_lengths: bool = False
    """With decentralized ranks: environments need not take equally many steps; an iteration ends once they have taken
    its steps together, so that one slow environment does not delay the others."""

    learner_device: Literal["cpu", "cuda"] = "cpu"
    """Device that computes updates; with "cuda" and several ranks, each rank has a GPU of its own."""

    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """Number format in which the learner's networks compute: "bf16" where the device is good at it, "tf32" on NVIDIA's
    GPUs (elsewhere it is float32). Weights, losses and optimizers stay in float32, and so do policies that act."""

    learner_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads for the update of each rank; small networks gain nothing from a second thread."""

    eval_episodes: Natural = 100
    """Episodes of one greedy evaluation; 0: no evaluation. There is one after training and, with eval_interval_steps,
    also during it. It takes at most max(50,000, total_steps / 10) steps: if eval_episodes x time limit is more, it
    plays fewer episodes, at least one."""

    eval_max_episode_steps: Count | None = None
    """Environment steps after which an episode of an evaluation is cut. It counts with the rewards so far. Unset: the
    environment's time limit, at least 10,000."""

    eval_deterministic: bool = True
    """Evaluate greedily, with the most probable actions; off: with actions that are drawn, as in training."""

    eval_env: Name | None = None
    """Environment of evaluations, as env_id; unset: that of the training."""

    eval_env_kwargs: dict[str, Scalar | list[Scalar]] = field(default_factory=dict)
    """Arguments of the environment of evaluations that differ from env_kwargs."""

    episode_metrics: tuple[str, ...] = ("is_success",)
    """Numbers in the info of an episode's last step whose means over the last 100 episodes are metrics."""

    eval_interval_steps: Count | None = None
    """Environment steps between two greedy evaluations during training. Each comes with a checkpoint. They have
    environments of their own on the driver's machine, and do not affect training. Unset: evaluation only after
    training."""

    track: Literal["wandb"] | None = None
    """Tracker that metrics go to as well: Weights & Biases, an extra."""

    checkpoint_interval_s: NonNegative = 5.0
    """Seconds of training between checkpoints; 0 saves one after every iteration."""

    on_env_error: Literal["raise", "restart"] = "raise"
    """What happens to an environment that raises, and to those of a worker that dies or hangs: "raise" ends the run,
    "restart" restarts the affected ones."""

    step_timeout_s: Positive | None = None
    """Seconds that a worker may take to step, or reset, all its environments, one after another, before it is killed;
    unset: no limit."""

    start_timeout_s: Positive = 300.0
    """Seconds that a worker may take to make all its environments, one after another, or to load a policy."""

    restart_env_every: Count | None = None
    """After how many finished episodes an environment is closed and made again, for simulators that leak; unset: never.
    Its next episode has a seed of its own. Native sub-batches do not support it."""

    replay_calls: tuple[str, ...] = ()
    """Names of methods and attributes, such as set_difficulty: where an environment is made again, the last call and
    the last value that callbacks gave it is repeated."""

    spare_envs: Annotated[int, Field(ge=0, le=1)] = 0
    """1 lets each worker keep one environment more, which is reset ahead and takes the place of one whose episode has
    ended: for environments whose resets are slow."""

    on_bad_obs: Literal["raise", "keep"] = "raise"
    """What happens to an observation or a reward that is NaN or infinite: "raise" ends the run, "keep" keeps it."""

    on_node_loss: Literal["rehost", "raise"] = "rehost"
    """What happens to the environments of a lost node: "rehost" restarts them on the nodes that remain, "raise" ends
    the run."""

    groups: Annotated[int, Field(ge=1, le=2)] = 1
    """With inference="driver": 2 lets the policy act on one half of the environments while the other half steps."""

    preload: tuple[str, ...] = ()
    """Modules that the workers import once for each node. A module that starts a thread on import is refused. Random
    generators and files that a module opens on import are shared by all workers."""

    plugin: tuple[str, ...] = ()
    """Modules that register algorithms; they are imported before the settings are read. On the command line, one module
    after each --plugin."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> ArgsKwargs:
        return ArgsKwargs((), with_preset(cls, given.kwargs or {}))

    def __post_init__(self) -> None:
        presets = ["none", *(name for name in PRESETS.get(self.algorithm, {}) if name.islower())]
        require(
            self.preset in presets,
            f"preset is {self.preset}. {self.algorithm} has the presets {', '.join(presets)}.",
        )
        require(
            self.eval_interval_steps is None or self.eval_episodes > 0,
            "eval_interval_steps was passed with eval_episodes=0. Pass eval_episodes of at least 1, or leave "
            "eval_interval_steps out.",
        )
        self._at_most("num_learners", self.num_envs, "num_envs", ": each rank learns from its own environments")
        require(
            self.learners != "driver" or self.num_learners == 1,
            f"num_learners={self.num_learners} was passed with learners='driver'. For several learners, pass "
            "learners='shared', 'dedicated' or 'decentralized'.",
        )
        if isinstance(self.num_nodes, tuple):
            name = "num_learners" if self.learner_mode == "decentralized" else "num_envs"
            limit, most = getattr(self, name), check_node_range(self.num_nodes)[1]
            require(most <= limit, f"num_nodes is {self.num_nodes}. The maximum must be at most {name} = {limit}.")
        require(
            self.learner_mode != "decentralized" or not self.claims_resources,
            "cores_per_env, gpus_per_env or resources_per_env was passed with learners='decentralized', whose ranks "
            "share their cores among their environments. Pass another value of learners.",
        )
        require(
            self.learner_mode != "dedicated" or (isinstance(self.num_nodes, int | None) and self.num_nodes != 0),
            f"num_nodes={self.num_nodes} was passed with learners='dedicated'. Dedicated ranks require one number of "
            "nodes, at least 1: pass one, or learners='driver', 'shared' or 'decentralized'.",
        )

    def _at_most(self, name: str, limit: int, of: str, why: str = "") -> None:
        """Refuses a setting above `limit`, which `of` names."""
        value = getattr(self, name)
        require(value <= limit, f"{name} is {value}. It must be at most {of} = {limit}{why}.")

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates of the weights."""
        raise NotImplementedError

    @property
    def collects_ahead(self) -> bool:
        """Whether the next chunk is collected while the learner learns from this one, with weights one update old.

        It takes effect only with ``inference="worker"``, and is never so with decentralized ranks.
        """
        return False

    @property
    def claims_resources(self) -> bool:
        """Whether environments need a certain part of their machine."""
        return bool(self.cores_per_env or self.gpus_per_env or self.resources_per_env)

    @property
    def learner_mode(self) -> str:
        """Where updates are computed: `learners`, or what it stands for where it is unset."""
        return self.learners or ("driver" if self.num_learners == 1 else "shared")

    @property
    def random_steps(self) -> int:
        """Environment steps at the beginning that are random, before any weights are published."""
        return 0

    @property
    def num_iterations(self) -> int:
        """The number of iterations of the run."""
        return math.ceil(self.total_steps / self.steps_per_iteration)

    def train_seed(self, steps: int) -> int:
        """Returns the seed of the episodes that begin after `steps` steps; environment i adds i to it.

        A run that is resumed does not play its first episodes again. The result lies in [0, 2^30 - 2^20).
        """
        return _derived_seed(self.seed, steps)

    def eval_seed(self, *, is_final: bool = True) -> int:
        """Returns the first seed of evaluation. It is at least 2^30, above all seeds of training.

        Args:
            is_final: Whether training has ended. Evaluations during training play other episodes, since the best
                weights are chosen by them.
        """
        return 2**30 + _derived_seed(self.seed, 0 if is_final else 1)

    def adjusted(self, **changes: Any) -> TrainConfig:
        """Returns the settings of the same run with changes of where and how fast it executes.

        Args:
            changes: Some of the settings in `ADJUSTABLE`. Others, and `algorithm`, may only have their value.

        Raises:
            ConfigError: A change is of a setting that decides what is learned.
        """
        adjustable = [name for name in ADJUSTABLE if name in field_names(type(self))]
        for name in sorted(changes.keys() - adjustable):
            before = getattr(self, name, "no such setting")
            require(
                changes[name] == before,
                f"{name} is {changes[name]!r}, but {before!r} in the run: a run keeps what decides what it learns. "
                "Leave it out, or begin a new run with init_from.",
            )
        if changes.get("num_nodes") == 0:
            changes = {"workers_per_node": None, **changes}  # the run's own was for nodes of Ray
        return replace(self, **{name: changes[name] for name in changes if name in adjustable})

    def to_yaml(self) -> str:
        """Returns the settings as commented YAML, from which `from_yaml` makes an equal object."""
        from rayvec.config.settings_yaml import write_yaml  # what computes on a GPU needs no YAML

        docs, chosen = docs_of(type(self)), by_preset(self)
        parts = []
        for name, value in self.to_plain().items():
            text = docs.get(name, "") + " (Chosen by the preset.)" * (name in chosen)
            parts += textwrap.wrap(text, 116, initial_indent="# ", subsequent_indent="# ")
            parts.append(write_yaml({name: value}))
        return "\n".join(parts)

    @staticmethod
    def from_yaml(text: str) -> TrainConfig:
        """Returns the settings that `to_yaml` wrote, as the class that their ``algorithm`` names.

        Raises:
            ConfigError: The settings are no mapping, or an algorithm, a name or a value in them is wrong.
        """
        from rayvec.config.settings_yaml import read_yaml

        return TrainConfig.from_plain(read_yaml(text))

    def to_plain(self) -> dict[str, Any]:
        """Returns the settings, with ``algorithm``, as strings, numbers, lists and dicts."""
        cls: Any = type(self)
        return {"algorithm": self.algorithm, **TypeAdapter(cls).dump_python(self, mode="json")}

    @staticmethod
    def from_plain(settings: object) -> TrainConfig:
        """Returns the settings that `to_plain` described.

        Raises:
            ConfigError: The settings are no mapping, or an algorithm, a name or a value in them is wrong.
        """
        values = dict(settings) if isinstance(settings, dict) else {}
        plugins = values.get("plugin")
        import_plugins(plugins if isinstance(plugins, list | tuple) else ())  # the class refuses anything else
        algorithm = str(values.pop("algorithm", None))
        require(
            algorithm in CONFIGS,
            f"The settings have the algorithm {algorithm}. They must be a mapping with one of {', '.join(CONFIGS)} as "
            "algorithm. For another one, pass --plugin MODULE that registers it.",
        )
        return CONFIGS[algorithm](**values)


def _derived_seed(seed: int, steps: int) -> int:
    """Returns a number in [0, 2^30 - 2^20), since some environments refuse seeds above 2^31."""
    return int(np.random.SeedSequence([seed, steps]).generate_state(1)[0]) % (2**30 - 2**20)
