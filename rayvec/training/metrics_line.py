"""The metrics of a run: what one line of ``metrics.jsonl`` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayvec.training.evaluation import Evaluation
from rayvec.training.run_state import Progress
from rayvec.training.trainer import Iteration

__all__ = ["MetricsLine"]


@dataclass
class MetricsLine:
    """Sums over the iterations since the line before.

    Attributes:
        steps: Environment steps.
        episodes: Episodes that ended.
        return_sum: Sum of their returns.
        staleness: The largest one.
        staleness_counts: How many columns of chunks were 0, 1, 2, ... versions old.
        num_cut: How many ranks were stopped early.
        sent_bytes: What ranks have sent in sums.
        times_s: Wall time by activity, and by what workers did meanwhile.
        learner: Metrics of the latest update.
        evaluation: The latest evaluation.
        has_state: Whether the latest iteration ends with a checkpoint.
    """

    steps: int = 0
    episodes: int = 0
    return_sum: float = 0.0
    staleness: int = 0
    staleness_counts: Counter[int] = field(default_factory=Counter)
    num_cut: int = 0
    sent_bytes: int = 0
    times_s: dict[str, float] = field(default_factory=dict)
    learner: dict[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    has_state: bool = False

    def add(self, iteration: Iteration) -> None:
        """Adds an iteration."""
        stats = iteration.stats
        self.steps += stats.n_collected_steps
        self.episodes += stats.n_collected_episodes
        self.return_sum += float(stats.returns.sum())
        self.staleness = max(self.staleness, stats.staleness)
        self.staleness_counts.update(dict(enumerate(stats.staleness_counts)))
        self.num_cut += iteration.num_cut
        self.sent_bytes += iteration.sent_bytes
        self._spend(iteration.all_times_s)
        self.learner.update(iteration.metrics)
        self.has_state = iteration.state is not None

    def add_evaluation(self, evaluation: Evaluation, seconds: float) -> None:
        """Adds an evaluation, which took some time."""
        self.evaluation = evaluation
        self._spend({"evaluate": seconds})

    def _spend(self, times_s: Mapping[str, float]) -> None:
        for name, seconds in times_s.items():
            self.times_s[name] = self.times_s.get(name, 0.0) + seconds

    def is_complete(self, num_steps: int) -> bool:
        """Whether the line ends: with a checkpoint, an evaluation, or after so many steps."""
        return self.has_state or self.evaluation is not None or self.steps >= num_steps

    @property
    def split_s(self) -> dict[str, float]:
        """Wall time by activity."""
        return {name: seconds for name, seconds in self.times_s.items() if "/" not in name}

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """Returns the metrics by name; returns, lengths and metrics of episodes are about the last 100 of them."""
        returns, lens = progress.recent_returns, progress.recent_lens
        whole_s = sum(self.split_s.values())
        metrics: dict[str, Any] = {
            "steps": progress.steps,
            "episodes": self.episodes,
            "return_sum": self.return_sum,
            "return_mean": float(np.mean(returns)) if returns else None,
            "return_min": min(returns) if returns else None,
            "return_max": max(returns) if returns else None,
            "len_mean": float(np.mean(lens)) if lens else None,
            **{f"episode/{name}": mean for name, mean in progress.metric_means().items()},
            "steps_per_s": self.steps / whole_s if whole_s else None,
            "staleness": self.staleness,
            **{f"time_s/{name}": seconds for name, seconds in self.times_s.items()},
            **{f"learner/{name}": value for name, value in self.learner.items()},
            **({"ranks_cut": self.num_cut, "sent_bytes": self.sent_bytes} if "wait" in self.times_s else {}),
        }
        if (evaluation := self.evaluation) is not None:
            metrics |= evaluation.metrics
        return metrics
