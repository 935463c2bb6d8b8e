"""Callbacks: objects that see a run while it trains, act on it, and can end it.

A callback has any of the methods in `HOOKS`. Each is called with the :class:`RunContext` of the run, in the process
that called :func:`rayvec.train`. What writes metrics and checkpoints, evaluates and shows progress are callbacks too:
see :func:`rayvec.training.default_callbacks.default_callbacks`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayvec.config import TrainConfig
from rayvec.data import EpisodeStats
from rayvec.data.batch import metric_means
from rayvec.errors import ConfigError, RayvecError, check_count, require
from rayvec.training import checkpoint
from rayvec.training.evaluation import eval_metrics
from rayvec.training.trainer import WINDOW, Iteration, Progress, RunEnvs

logger = logging.getLogger(__name__)

HOOKS = ("on_start", "on_iteration", "on_evaluation", "on_log", "on_checkpoint", "on_end", "on_close")
"""The methods that a callback may have, in the order in which a run calls them; `on_close` of the last one first."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Totals of a finished run.

    Attributes:
        run_dir: The directory of the run.
        total_steps: Environment steps taken.
        wall_s: Wall time in seconds, with the start of the environments and the evaluation; for a resumed run, the
            time up to the checkpoint plus the time since.
        eval_return_mean: Mean return of the evaluation after training; NaN without one.
        stop_reason: Why a callback ended the run; None if the run took all its steps.
    """

    run_dir: Path
    total_steps: int
    wall_s: float
    eval_return_mean: float
    stop_reason: str | None = None


@dataclass
class MetricsLine:
    """What one line of ``metrics.jsonl`` says of the iterations since the line before.

    Attributes:
        sums: By name: steps, episodes that ended, their returns, wall time by activity (with a second slash by what
            workers did meanwhile), and for decentralized ranks those that were stopped early and bytes sent.
        latest: By name, metrics of the latest update and of the latest evaluation.
        staleness: Of the oldest weights that acted, in updates.
    """

    sums: Any = field(default_factory=Counter)
    latest: dict[str, float] = field(default_factory=dict)
    staleness: int = 0

    def add(self, iteration: Iteration) -> None:
        """Adds an iteration."""
        stats = iteration.stats
        self.sums.update(steps=stats.n_collected_steps, episodes=stats.n_collected_episodes)
        self.sums.update({f"time_s/{name}": seconds for name, seconds in iteration.all_times_s.items()})
        self.sums.update(return_sum=float(stats.returns.sum()))
        if "wait" in iteration.times_s:
            self.sums.update(ranks_cut=iteration.num_cut)
        self.staleness = max(self.staleness, stats.staleness)
        self.latest.update({f"learner/{name}": value for name, value in iteration.metrics.items()})

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """Returns the metrics by name; returns, lengths and metrics of episodes are about the last 100 of them."""
        returns = progress.recent_returns
        whole_s = sum(seconds for name, seconds in self.sums.items() if name.count("/") == 1)
        return {
            **self.sums,
            "steps": progress.steps,
            "return_mean": float(np.mean(returns)) if returns else None,
            "return_min": min(returns, default=None),
            "return_max": max(returns, default=None),
            "len_mean": float(np.mean(progress.recent_lens)) if returns else None,
            **{f"episode/{name}": mean for name, mean in metric_means(progress.recent_metrics).items()},
            "steps_per_s": self.sums["steps"] / whole_s if whole_s else None,
            "staleness": self.staleness,
            **self.latest,
        }


@dataclass
class RunContext:
    """What a callback sees of a run, and how it acts on it.

    Attributes:
        config: The settings.
        run_dir: The directory of the run.
        progress: How far the run has come: ``steps``, ``episodes``, ``iterations``; returns, lengths and own metrics of
            the last 100 episodes; mean returns of the latest and of the best evaluation; and in the dict ``own`` what
            callbacks keep in checkpoints.
        iteration: What the latest iteration did: ``stats`` of its steps, ``times_s``, and others.
        metrics: The metrics since the last line of ``metrics.jsonl``, by the names that they have there.
        evaluation: The latest evaluation; None before the first one.
        is_best: Whether its mean return is larger than that of every evaluation before.
        weights: The acting weights that were evaluated, ``float32 [P]``.
        stop_reason: Why the run ends early; None while it does not.
        result: The totals of the run; None until `on_end`.
        error: In `on_close`, the exception that ends the run; None without one.
        logged: Numbers that callbacks have logged since the last line, by their names there; see :meth:`log`.
        line: Sums since the last line.
        state: In `on_checkpoint`, what the checkpoint holds.
        trainer: Makes the iterations; None while the run has no environments.
        wants_checkpoint: Whether the next iteration ends with a checkpoint.
    """

    config: TrainConfig
    run_dir: Path
    progress: Progress
    iteration: Iteration | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluation: EpisodeStats | None = None
    is_best: bool = False
    weights: NDArray[np.float32] | None = None
    stop_reason: str | None = None
    result: TrainResult | None = None
    error: BaseException | None = None
    logged: dict[str, float] = field(default_factory=dict)
    line: MetricsLine = field(default_factory=MetricsLine)
    state: dict[str, Any] = field(default_factory=dict)
    trainer: Any = None
    wants_checkpoint: bool = False

    @property
    def env(self) -> RunEnvs:
        """The environments of the run: ``call``, ``get_attr`` and ``set_attr`` reach all of them.

        Raises:
            ConfigError: The run has not started, or training has ended.
        """
        return RunEnvs(self._running("env"), self.config.num_envs)

    @property
    def learner(self) -> Any:
        """The learner, or the :class:`rayvec.LearnerGroup`; None with decentralized ranks, which have one each."""
        return self._running("learner").learner

    def set_learning_rate(self, value: float | None) -> None:
        """Sets the learning rate of the next updates, in place of its schedule; None returns to the schedule.

        It is a part of checkpoints. Where iterations are made ahead, as by decentralized ranks, it acts one later.

        Raises:
            ConfigError: The number is negative or not finite, or the learner has no method ``set_learning_rate``.
        """
        value = None if value is None else float(value)  # a checkpoint holds no number of NumPy
        require(
            value is None or 0 <= value < math.inf,
            f"context.set_learning_rate was called with {value}. Pass a finite number from 0 on, or None.",
        )
        self._running("set_learning_rate").set_learning_rate(value)
        self.progress.learning_rate = value

    def _running(self, name: str) -> Any:
        require(
            self.trainer is not None,
            f"context.{name} was used while the run has no environments. Use it from on_start to on_checkpoint, "
            "not in on_end or on_close.",
        )
        return self.trainer

    def add_evaluation(self, evaluation: EpisodeStats, weights: NDArray[np.float32], seconds: float) -> None:
        """Takes an evaluation of the acting weights ``float32 [P]``, which took some time."""
        progress = self.progress
        if evaluation.num_cut and not progress.has_cut:
            progress.has_cut = True
            logger.warning(
                "%d of %d episodes of an evaluation were cut: they did not end within %s steps. They count with the "
                "rewards so far. Wrap the environment in gymnasium.wrappers.TimeLimit, or set eval_max_episode_steps",
                evaluation.num_cut,
                len(evaluation.lens),
                f"{evaluation.lens.max():,}",
            )
        self.evaluation, self.weights = evaluation, weights
        progress.eval_return = mean = evaluation.return_mean
        self.is_best = progress.best_return is None or mean > progress.best_return
        progress.best_return = mean if self.is_best else progress.best_return
        self.line.sums.update({"time_s/evaluate": seconds})
        self.line.latest.update(eval_metrics(evaluation))
        self.metrics = self.line.metrics(progress)

    def stop(self, reason: str) -> None:
        """Ends the run like one that has taken all its steps: with a checkpoint and the final evaluation.

        An iteration that has already begun is completed. The first reason is kept, and written into ``result.json``.

        Args:
            reason: One sentence.
        """
        self.stop_reason = self.stop_reason or reason or "a callback stopped the run"

    def log(self, name: str, value: Any) -> None:
        """Adds a number to the next line of ``metrics.jsonl``, and to TensorBoard.

        If a name is logged several times before a line is written, the last number counts.

        Args:
            name: Its name there is ``callback/<name>``.
            value: One number, also one of NumPy or torch; NaN and infinity become null in ``metrics.jsonl``.
        """
        self.logged[f"callback/{name}"] = float(value)

    def request_checkpoint(self) -> None:
        """Lets the next iteration end with a checkpoint."""
        self.wants_checkpoint = True


def checked_callbacks(callbacks: Any) -> list[Any]:
    """Returns callbacks as a list, also a single one.

    Raises:
        ConfigError: One of them is a class, or has none of the methods of a callback.
    """
    found = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in found:
        if isinstance(callback, type) or not has_hooks(callback):
            raise ConfigError(
                f"The callback {callback!r} is a class, or has no method of callbacks. Pass an instance of a class "
                f"with at least one of {', '.join(HOOKS)}."
            )
    return found


def has_hooks(value: Any) -> bool:
    """Whether an object has a method of callbacks."""
    return any(hasattr(value, hook) for hook in HOOKS)


def call(callbacks: Sequence[Any], hook: str, context: RunContext) -> None:
    """Calls one method of each callback that has it; an exception gets a note that names the callback."""
    for callback in callbacks:
        try:
            getattr(callback, hook, lambda _: None)(context)
        except Exception as error:
            if hook != "on_start" or not isinstance(error, RayvecError):  # which says what the run can't begin with
                error.add_note(f"raised in {hook} of the callback {type(callback).__name__}")
            raise


class StopAtReturn:
    """Ends the run once the mean return reaches a value.

    With `eval_interval_steps`, that is the mean of a greedy evaluation. Without it, it is the mean of the last
    episodes of training.

    Args:
        return_mean: The value.
        num_episodes: How many episodes of training count, at most 100, and must have ended; evaluations count whatever
            their number of episodes.
    """

    def __init__(self, return_mean: float, num_episodes: int = WINDOW) -> None:
        self._return_mean, self._num_episodes = return_mean, min(num_episodes, WINDOW)

    def on_iteration(self, context: RunContext) -> None:
        """Looks at the last episodes of training, in a run without evaluations during training."""
        recent = context.progress.recent_returns[-self._num_episodes :]
        if context.config.eval_interval_steps is None and len(recent) == self._num_episodes:
            self._look(context, float(np.mean(recent)), f"the last {self._num_episodes} episodes")

    def on_evaluation(self, context: RunContext) -> None:
        """Looks at a greedy evaluation."""
        if context.evaluation is not None:
            self._look(context, context.evaluation.return_mean, "a greedy evaluation")

    def _look(self, context: RunContext, return_mean: float, what: str) -> None:
        if return_mean >= self._return_mean:
            context.stop(f"the mean return of {what}, {return_mean:.2f}, reached {self._return_mean:g}")


class BestModel:
    """Writes ``best.pt``, the weights of the best greedy evaluation; :func:`rayvec.load` reads it.

    A run with `eval_interval_steps` has this callback already.
    """

    def on_evaluation(self, context: RunContext) -> None:
        """Replaces the file if no evaluation before had a larger mean return."""
        if context.is_best and context.weights is not None:
            state = {"weights": torch.from_numpy(context.weights), "progress": asdict(context.progress)}
            checkpoint.save(context.run_dir / "best.pt", state)


class CheckpointHistory:
    """Keeps checkpoints beside the last one: ``checkpoints/<steps>.pt``, to load or to begin another run with.

    Args:
        interval_steps: Environment steps between two of them, rounded up to whole iterations. The first iteration of a
            run is not kept.
        keep: How many of the newest are kept; unset: all.
    """

    def __init__(self, interval_steps: int, keep: int | None = None) -> None:
        self._interval_steps = check_count("interval_steps", interval_steps)
        self._keep = None if keep is None else check_count("keep", keep)

    def on_iteration(self, context: RunContext) -> None:
        """Requests the checkpoint of the next iteration, if it is to be kept."""
        if self._is_due(context, context.config.steps_per_iteration):
            context.request_checkpoint()

    def on_checkpoint(self, context: RunContext) -> None:
        """Keeps the checkpoint, if it is the first one since the interval has passed."""
        if self._is_due(context, 0):
            path = context.run_dir / "checkpoints" / f"{context.progress.steps:012}.pt"
            path.parent.mkdir(exist_ok=True)
            checkpoint.save(path, context.state)
            for old in self._paths(context)[: -self._keep] if self._keep else ():
                old.unlink()

    def _is_due(self, context: RunContext, more: int) -> bool:
        """Whether an interval has passed since the last checkpoint that was kept, after some more steps."""
        steps = context.progress.steps
        kept = max((count for path in self._paths(context) if (count := int(path.stem)) <= steps), default=0)
        return (steps + more) // self._interval_steps > kept // self._interval_steps

    def _paths(self, context: RunContext) -> list[Path]:
        return sorted(path for path in (context.run_dir / "checkpoints").glob("*.pt") if path.stem.isdecimal())
