"""What a run is made of: its directory, and the environments and the learner that its settings ask for.

    runs/<name>/
    ├── config.yaml            the settings, commented
    ├── metrics.jsonl          a line for each iteration
    ├── events.out.tfevents.*  the same for TensorBoard
    ├── checkpoint.pt          all that going on takes
    ├── learning_curve.png     return against steps
    └── result.json            totals, and the greedy evaluation

Learners are found by the class of their settings: a new algorithm adds a line to `LEARNERS` and its
config to `rayvec.config.CONFIGS`, and nothing else here changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayvec import checkpoint
from rayvec.config import IMPALAConfig, PPOConfig, TrainConfig
from rayvec.errors import ConfigError, message
from rayvec.learners.base import Learner
from rayvec.learners.impala import IMPALALearner
from rayvec.learners.ppo import PPOLearner
from rayvec.vector import RayVecEnv

__all__ = [
    "LEARNERS",
    "create_run_dir",
    "free_run_dir",
    "load_run",
    "make_env",
    "make_learner",
    "save_checkpoint",
    "save_result",
]

LEARNERS: dict[type[TrainConfig], Callable[..., Learner]] = {PPOConfig: PPOLearner, IMPALAConfig: IMPALALearner}
"""What learns, by the class of its settings: called with the spaces of one environment and the settings."""


def make_env(config: TrainConfig) -> RayVecEnv:
    """Returns the environments of a run, on Ray; to be closed by the caller."""
    return RayVecEnv(
        config.env_id,
        config.num_envs,
        env_kwargs=config.env_kwargs,
        num_nodes=config.num_nodes,
        workers_per_node=config.workers_per_node,
        address=config.address,
    )


def make_learner(config: TrainConfig, env: RayVecEnv) -> Learner:
    """Returns the learner of a run with its initial weights."""
    return LEARNERS[type(config)](env.single_observation_space, env.single_action_space, config)


def free_run_dir(config: TrainConfig) -> Path:
    """Returns the directory of a run that is about to begin.

    Raises:
        ConfigError: There is something in its place.
    """
    env_name = config.env_id.replace("/", "-").replace(":", "-")
    name = f"{env_name}-{config.algorithm}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = config.run_dir or Path("runs") / name
    if run_dir.exists():
        raise ConfigError(
            message(
                "A run has a directory of its own.",
                expected="a path where there is nothing yet",
                got=f"{run_dir}, which exists",
                remedy=f"Pass another run_dir, or go on with that run: rayvec train {config.algorithm} "
                f"--resume {run_dir}",
            )
        )
    return run_dir


def create_run_dir(run_dir: Path, config: TrainConfig) -> None:
    """Makes the directory of a run and writes its settings into it."""
    try:
        run_dir.mkdir(parents=True)
        (run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            message(
                "A run writes into a directory of its own.",
                expected="a path where a directory can be made",
                got=f"{run_dir} ({error.strerror})",
                remedy="Pass another run_dir.",
            )
        ) from error


def save_checkpoint(run_dir: Path, state: dict[str, Any]) -> None:
    """Replaces the checkpoint of a run; see `rayvec.checkpoint.save`."""
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
            message(
                "The directory of a run holds its settings and its checkpoint.",
                expected=f"a readable file {run_dir / 'config.yaml'}",
                got=error.strerror,
                remedy="Pass the directory of a run, such as one below runs/.",
            )
        ) from None
    return TrainConfig.from_yaml(text), checkpoint.load(run_dir / "checkpoint.pt")
