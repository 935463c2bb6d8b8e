"""The state of a run: how far it has come, what a checkpoint holds, and how its parts continue from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.collect.checks import check_state as check_collector_state
from rayvec.collect.collector import Collector
from rayvec.config import TrainConfig
from rayvec.data import CollectStats
from rayvec.errors import CheckpointError, ConfigError, EnvError, LearnerError, NodeLostError, WorkerLostError
from rayvec.learners.base import Learner
from rayvec.policies.policy import Policy
from rayvec.training.checkpoint import incomplete
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["WINDOW", "Progress", "acting_weights", "begin_collecting", "check_state", "restore"]

WINDOW = 100
"""Returns and lengths in metrics are about this many last episodes."""


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        steps: Environment steps taken.
        episodes: Episodes ended.
        iterations: Rounds of sampling and learning.
        wall_s: Wall time up to the last checkpoint, in seconds.
        recent_returns: Returns of the last `WINDOW` episodes.
        recent_lens: Their lengths in steps.
        recent_metrics: By name, numbers in the info of their last steps; None where it had none.
        eval_return: Mean return of the latest greedy evaluation.
        best_return: Largest mean return of the greedy evaluations.
        tracker_run: Id of the run of Weights & Biases that belongs to it.
        own: What callbacks keep in checkpoints, by name: tensors and plain values.
        has_cut: Whether a warning has said that episodes of evaluations are cut.
        learning_rate: The learning rate that a callback has set; None: the schedule holds.
    """

    steps: int = 0
    episodes: int = 0
    iterations: int = 0
    wall_s: float = 0.0
    recent_returns: list[float] = field(default_factory=list)
    recent_lens: list[int] = field(default_factory=list)
    recent_metrics: dict[str, list[float | None]] = field(default_factory=dict)
    eval_return: float | None = None
    best_return: float | None = None
    tracker_run: str | None = None
    own: dict[str, Any] = field(default_factory=dict)
    has_cut: bool = False
    learning_rate: float | None = None

    def add(self, stats: CollectStats) -> None:
        """Counts an iteration."""
        self.steps += stats.n_collected_steps
        self.episodes += stats.n_collected_episodes
        self.iterations += 1
        self.recent_returns = [*self.recent_returns, *stats.returns.tolist()][-WINDOW:]
        self.recent_lens = [*self.recent_lens, *stats.lens.tolist()][-WINDOW:]
        for name, values in stats.metrics.items():
            before = self.recent_metrics.get(name, [])
            plain = [None if value != value else value for value in values.tolist()]
            self.recent_metrics[name] = [*before, *plain][-WINDOW:]

    def metric_means(self) -> dict[str, float]:
        """Returns means over the last `WINDOW` episodes of what their last infos said, by name."""
        found = {name: [value for value in values if value is not None] for name, values in self.recent_metrics.items()}
        return {name: sum(values) / len(values) for name, values in found.items() if values}

    def add_evaluation(self, return_mean: float) -> bool:
        """Keeps the mean return of a greedy evaluation; returns whether it is the best so far."""
        self.eval_return = return_mean
        is_best = self.best_return is None or return_mean > self.best_return
        if is_best:
            self.best_return = return_mean
        return is_best


def check_state(state: Mapping[str, Any]) -> None:
    """Checks that `state`, which was read from a checkpoint, has all its parts.

    Raises:
        CheckpointError: A part is missing, or has a value of another type.
    """
    if missing := sorted({"weights", "learner", "collector", "progress"} - state.keys()):
        raise incomplete(f"no {', '.join(missing)}")
    acting_weights(state)
    for name, check in (("learner", dict), ("collector", check_collector_state), ("progress", _check_progress)):
        try:
            check(state[name])
        except (TypeError, ValueError) as error:
            raise incomplete(f"{name}: {error}") from error


def _check_progress(values: Mapping[str, Any]) -> None:
    progress = Progress(**values)
    counts = progress.steps, progress.episodes, progress.iterations
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"counts {counts}")


def acting_weights(state: Mapping[str, Any]) -> NDArray[np.float32]:
    """Returns the acting weights of a checkpoint, ``float32 [P]``.

    Raises:
        CheckpointError: It has none.
    """
    weights = state.get("weights")
    if not isinstance(weights, torch.Tensor) or weights.dtype != torch.float32 or weights.ndim != 1:
        raise incomplete("no weights" if weights is None else f"weights: {weights!r}"[:200])
    return weights.numpy()


def begin_collecting(
    config: TrainConfig,
    env: RayVecEnv,
    learner: Learner,
    progress: Progress,
    state: Mapping[str, Any] | None,
    first_id: int = 0,
) -> Collector:
    """Returns the collector of a run, which continues from `state`, the state of a collector, if there is one.

    Args:
        config: Settings of the run.
        env: The environments.
        learner: The learner, with the weights of that time.
        progress: How far the run has come.
        state: What ``Collector.state_dict()`` returned.
        first_id: Global index of the first environment.

    Raises:
        CheckpointError: `state` is that of another collector.
    """
    has_learned = config.init_from is not None or (state is not None and state.get("version", 0) > 0)
    policy = Policy(
        learner.module,
        random_start=config.random_steps > 0 and not has_learned,
        device=_acting_device(config, env),
    )
    if has_learned:
        policy.load_weights(learner.weights())
    in_workers = config.inference == "worker"
    outlives_update = config.num_nodes != 0 and not isinstance(config.num_nodes, tuple)  # an elastic node may not
    collector = Collector(
        env,
        policy,
        inference=config.inference,
        seed=config.seed,
        prefetch=in_workers and config.collects_ahead,
        by_reference=in_workers and outlives_update and config.learner_mode in ("shared", "dedicated"),
        max_staleness=getattr(config, "max_staleness", None) if in_workers else None,
        on_bad_obs=config.on_bad_obs,
        episode_metrics=config.episode_metrics,
    )
    if state is not None:
        restore(collector, state)
    collector.reset(seed=config.train_seed(progress.steps) + first_id)
    return collector


def _acting_device(config: TrainConfig, env: RayVecEnv) -> str:
    """Returns the device on which the policy acts.

    Raises:
        ConfigError: It would be a GPU in an actor of a Ray node, which claims none.
    """
    if config.inference != "node" or getattr(config, "recurrent", None):
        return "cpu"
    if config.learner_device != "cpu" and "tcp" in env.transports:
        raise ConfigError(
            f"inference='node' was passed with learner_device={config.learner_device!r} and environments on other "
            "nodes. Pass learners='decentralized', where each rank claims a GPU, num_nodes=0, or "
            "inference='worker'."
        )
    return config.learner_device


def restore(part: Any, state: Mapping[str, Any]) -> None:
    """Lets a learner or collector continue from a state.

    Raises:
        CheckpointError: The state is that of another one.
    """
    try:
        part.load_state_dict(state)
    except (CheckpointError, EnvError, LearnerError, WorkerLostError, NodeLostError, torch.OutOfMemoryError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise incomplete(f"{type(part).__name__}: {type(error).__name__}: {error}") from error
