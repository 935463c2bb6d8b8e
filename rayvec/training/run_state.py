"""The state of a run: how far it has come, and how its parts continue from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.data import CollectStats
from rayvec.errors import ConfigError, RayvecError
from rayvec.training.checkpoint import incomplete

__all__ = ["WINDOW", "Progress", "acting_weights", "restore"]

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
        recent_metrics: By name, numbers in the info of their last steps; NaN where it had none.
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
    recent_metrics: dict[str, list[float]] = field(default_factory=dict)
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
            self.recent_metrics[name] = [*self.recent_metrics.get(name, []), *values.tolist()][-WINDOW:]

    def metric_means(self) -> dict[str, float]:
        """Returns means over the last `WINDOW` episodes of what their last infos said, by name."""
        found = {name: [value for value in values if value == value] for name, values in self.recent_metrics.items()}
        return {name: sum(values) / len(values) for name, values in found.items() if values}


def acting_weights(state: Mapping[str, Any]) -> NDArray[np.float32]:
    """Returns the acting weights of a checkpoint, ``float32 [P]``.

    Raises:
        CheckpointError: It has none.
    """
    weights = state.get("weights")
    if not isinstance(weights, torch.Tensor):
        raise incomplete("no weights")
    return weights.numpy()


def restore(part: Any, state: Any) -> None:
    """Lets a learner or collector continue from a state.

    Raises:
        CheckpointError: The state is that of another one.
    """
    try:
        part.load_state_dict(state)
    except Exception as error:
        if isinstance(error, RayvecError | torch.OutOfMemoryError) and not isinstance(error, ConfigError):
            raise
        raise incomplete(f"{type(part).__name__}: {type(error).__name__}: {error}") from error
