"""What a run is made of: its directory, and the environments and the learner that its settings ask for.

    runs/<name>/
    ├── config.yaml            the settings, commented
    ├── metrics.jsonl          a line for each iteration
    ├── events.out.tfevents.*  the same for TensorBoard
    ├── checkpoint.pt          all that going on takes
    ├── learning_curve.png     return against steps
    └── result.json            totals, and the greedy evaluation

Learners are found by the class of their settings: a new algorithm is `register`-ed, and nothing else here
changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import rayvec
from rayvec.config import CONFIGS, IMPALAConfig, PPOConfig, SACConfig, TrainConfig
from rayvec.data import CollectStats
from rayvec.errors import CheckpointError, ConfigError
from rayvec.learners.base import Learner
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.learners.sac import SACLearner
from rayvec.training import checkpoint
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = [
    "LEARNERS",
    "Progress",
    "begin_run_dir",
    "free_run_dir",
    "load_run",
    "locked",
    "make_env",
    "make_learner",
    "open_learner",
    "register",
    "restore",
    "save_checkpoint",
    "save_result",
]

LEARNERS: dict[type[TrainConfig], Callable[..., Learner]] = {
    PPOConfig: PPOLearner,
    SACConfig: SACLearner,
    IMPALAConfig: IMPALALearner,
}
"""What learns, by the class of its settings: called with the spaces of one environment and the settings."""

_WAIT_S, _COMPILING_S = 60.0, 300.0
"""How long ranks wait for each other; a rank that compiles for another shape takes half a minute and more."""

_PARTS = {"weights", "learner", "collector", "progress"}


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        steps: Environment steps taken.
        episodes: Episodes ended.
        iterations: Rounds of sampling and learning.
        wall_s: Wall time up to the last checkpoint, in seconds.
    """

    steps: int = 0
    episodes: int = 0
    iterations: int = 0
    wall_s: float = 0.0

    def add(self, stats: CollectStats) -> None:
        """Counts an iteration."""
        self.steps += stats.n_collected_steps
        self.episodes += stats.n_collected_episodes
        self.iterations += 1


def register(config_class: type[TrainConfig], learner: Callable[..., Learner]) -> None:
    """Adds an algorithm: from now on :func:`rayvec.train` takes settings of this class.

    Args:
        config_class: A frozen dataclass derived from :class:`rayvec.TrainConfig`, with a name in ``algorithm``.
        learner: Called with the observation space and the action space of one environment and the settings.
    """
    CONFIGS[config_class.algorithm] = config_class
    LEARNERS[config_class] = learner


def make_env(config: TrainConfig) -> RayVecEnv:
    """Returns the environments of a run; to be closed by the caller."""
    return RayVecEnv(
        config.env_id,
        config.num_envs,
        env_kwargs=config.env_kwargs,
        wrappers=[_function(name) for name in config.wrappers],
        num_nodes=config.num_nodes,
        workers_per_node=config.workers_per_node,
        address=config.address if config.num_nodes != 0 else None,  # of the learner's ranks, if there are any
    )


def _function(name: str) -> Callable[..., Any]:
    """Returns what "module:function" names; whoever gets it pickled imports it again."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        if callable(function):
            return function  # type: ignore[no-any-return]
        problem = "no function"
    except (ImportError, AttributeError, ValueError) as error:
        problem = str(error)
    raise ConfigError(
        "wrappers names functions that take an environment and return one.",
        expected="module:function, which can be imported",
        got=f"{name!r} ({problem})",
        remedy='Correct the name, for example "gymnasium.wrappers:FlattenObservation".',
    )


def make_learner(config: TrainConfig, env: RayVecEnv) -> Learner:
    """Returns the learner of a run with its initial weights, in this process."""
    return _learner_builder(config, env)()


@contextlib.contextmanager
def open_learner(config: TrainConfig, env: RayVecEnv) -> Iterator[Learner]:
    """Yields the learner of a run with its initial weights: in this process, or as ranks on Ray.

    Ranks on other nodes than the environments claim their cores. On the same nodes they share the cores of the
    environments' workers. Those wait while the ranks learn, but not with `prefetch`, as in SAC and IMPALA: then
    `learners_apart`, or fewer workers, keep them from competing.
    """
    build = _learner_builder(config, env)
    if config.learns_in_driver:
        yield build()
        return
    if config.num_nodes == 0 and config.learners_apart:
        raise ConfigError(
            "learners_apart puts ranks on nodes of Ray where no environments step.",
            expected="environments on nodes of Ray",
            got="num_nodes=0: the driver's process steps them",
            remedy="Leave learners_apart out, or pass num_nodes=1.",
        )
    group = rayvec.LearnerGroup(
        build,
        config.num_learners,
        config.learner_device,
        learner_threads=config.learner_threads,
        timeout_s=_COMPILING_S if getattr(config, "compile", False) else _WAIT_S,
        num_cpus=None if config.learners_apart else 0,
        avoid_nodes=[node.node_id for node in env.topology.nodes] if config.learners_apart else (),
        address=config.address,
    )
    with contextlib.closing(group):
        yield group


def _learner_builder(config: TrainConfig, env: RayVecEnv) -> Callable[[], Learner]:
    return functools.partial(LEARNERS[type(config)], env.single_observation_space, env.single_action_space, config)


def restore(part: Any, state: Mapping[str, Any]) -> None:
    """Lets a part of a run go on from its state.

    Raises:
        CheckpointError: The state is of another kind of part.
    """
    try:
        part.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _incomplete(f"of the {type(part).__name__} ({type(error).__name__}: {error})") from error


def _incomplete(what: str) -> CheckpointError:
    return CheckpointError(
        "A checkpoint holds everything that a run goes on from.",
        expected="a checkpoint that this version of rayvec wrote with these settings",
        got=f"one without what it takes {what}",
        remedy="Use the version and the config.yaml that it was written with, or train the run anew.",
    )


def free_run_dir(config: TrainConfig) -> Path:
    """Returns the directory of a run that is about to begin.

    Raises:
        ConfigError: There is something in its place.
    """
    env_name = config.env_id.replace("/", "-").replace(":", "-")
    name = f"{env_name}-{config.algorithm}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = config.run_dir or Path("runs") / name
    if run_dir.exists():
        raise _taken(run_dir, config)
    return run_dir


def _taken(run_dir: Path, config: TrainConfig) -> ConfigError:
    return ConfigError(
        "A run has a directory of its own.",
        expected="a path where there is nothing yet",
        got=f"{run_dir}, which exists",
        remedy=f"Pass another run_dir, or go on with that run: rayvec train {config.algorithm} --resume {run_dir}",
    )


def begin_run_dir(run_dir: Path, config: TrainConfig, state: dict[str, Any]) -> None:
    """Makes the directory of a run with its settings and a first checkpoint: all of it, or nothing.

    Whenever a run is killed, it can be resumed if its directory is there.

    Raises:
        ConfigError: The directory can't be made, or has come into being since.
    """
    partial = run_dir.with_name(f".{run_dir.name}.{os.getpid()}.tmp")
    try:
        partial.mkdir(parents=True)
        (partial / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        save_checkpoint(partial, state)
        partial.rename(run_dir)  # replaces an empty directory at most
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and run_dir.exists():
            raise _taken(run_dir, config) from error
        raise ConfigError(
            "A run writes into a directory of its own.",
            expected="a path where a directory can be made",
            got=f"{run_dir} ({error.strerror})",
            remedy="Pass another run_dir.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keeps other processes from training in the same directory; the lock ends with the process, however that ends.

    Raises:
        ConfigError: Another one is at work there.
    """
    try:
        directory = os.open(run_dir, os.O_RDONLY)
    except OSError:
        yield  # whoever reads the run will say what is wrong
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks, but:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _busy(run_dir) from None
        yield
    finally:
        os.close(directory)


def _busy(run_dir: Path) -> ConfigError:
    return ConfigError(
        "One process at a time trains in the directory of a run.",
        expected=f"no other process at work in {run_dir}",
        got="one that is",
        remedy="Wait until it has ended, or stop it with Ctrl-C; then resume.",
    )


def save_checkpoint(run_dir: Path, state: dict[str, Any]) -> None:
    """Replaces the checkpoint of a run; see `rayvec.training.checkpoint.save`."""
    checkpoint.save(run_dir / "checkpoint.pt", state)


def save_result(run_dir: Path, config: TrainConfig, totals: Mapping[str, Any], returns: Sequence[float]) -> None:
    """Writes ``result.json``.

    Args:
        run_dir: Directory of the run.
        config: Its settings.
        totals: What to write, by name; NaN becomes null.
        returns: Return of each episode of the greedy evaluation.
    """
    run = {"algorithm": config.algorithm, "env_id": config.env_id, "seed": config.seed}
    values = {name: None if value != value else value for name, value in totals.items()}
    text = json.dumps({**run, **values, "eval_returns": list(returns)}, indent=2, allow_nan=False, default=str)
    (run_dir / "result.json").write_text(text + "\n", encoding="utf-8")


def load_run(run_dir: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the settings of a run and the state of its last checkpoint.

    Raises:
        ConfigError: `run_dir` is not the directory of a run.
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    try:
        text = (run_dir / "config.yaml").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "The directory of a run holds its settings and its checkpoint.",
            expected=f"a readable file {run_dir / 'config.yaml'}",
            got=error.strerror,
            remedy="Pass the directory of a run, such as one below runs/.",
        ) from None
    config, state = TrainConfig.from_yaml(text), checkpoint.load(run_dir / "checkpoint.pt")
    if missing := sorted(_PARTS - state.keys()):
        raise _incomplete(f"(no {', '.join(missing)})")
    if state["progress"].keys() != {item.name for item in fields(Progress)}:
        raise _incomplete(f"(progress: {', '.join(state['progress'])})")
    return config, state
