"""Callbacks: objects that see a run while it trains, act on it, and can end it.

A callback has any of the methods in `HOOKS`. Each is called with the :class:`RunContext` of the run, in the process
that called :func:`rayvec.train`. What writes metrics and checkpoints, evaluates and shows progress are callbacks too:
see :func:`rayvec.training.default_callbacks.default_callbacks`.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import reprlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.config import TrainConfig
from rayvec.errors import ConfigError, RayvecError, check_count
from rayvec.training.atomic_files import written_whole
from rayvec.training.evaluation import Evaluation
from rayvec.training.metrics_line import MetricsLine
from rayvec.training.run_dir import save_best
from rayvec.training.run_state import WINDOW, Progress
from rayvec.training.trainer import Iteration, RunEnvs, RunTrainer

logger = logging.getLogger(__name__)

__all__ = [
    "HOOKS",
    "BestModel",
    "CheckpointHistory",
    "RunContext",
    "StopAtReturn",
    "TrainResult",
    "call",
    "checked_callbacks",
    "has_hooks",
]

HOOKS = ("on_start", "on_iteration", "on_evaluation", "on_log", "on_checkpoint", "on_end", "on_close")
"""The methods that a callback may have, in the order in which a run calls them; `on_close` of the last one first."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Totals of a finished run.

    Attributes:
        run_dir: The directory of the run.
        total_steps: Environment steps taken.
        wall_s: Wall time in seconds, with the start of the environments and the evaluation; for a resumed run, the
            time up to the checkpoint plus the time since. If the run had finished, it includes its earlier evaluation.
        eval_return_mean: Mean return of the evaluation after training; NaN without one.
        stop_reason: Why a callback ended the run; None if the run took all its steps.
    """

    run_dir: Path
    total_steps: int
    wall_s: float
    eval_return_mean: float
    stop_reason: str | None = None


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
    """

    config: TrainConfig
    run_dir: Path
    progress: Progress
    iteration: Iteration | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    is_best: bool = False
    weights: NDArray[np.float32] | None = None
    stop_reason: str | None = None
    result: TrainResult | None = None
    error: BaseException | None = None
    logged: dict[str, float] = field(default_factory=dict)
    line: MetricsLine = field(default_factory=MetricsLine)
    state: dict[str, Any] = field(default_factory=dict)
    trainer: RunTrainer | None = None
    _wants_checkpoint: bool = False

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
            ConfigError: The learner has no method ``set_learning_rate``.
        """
        self._running("set_learning_rate").set_learning_rate(value)
        self.progress.learning_rate = value

    def _running(self, name: str) -> RunTrainer:
        if self.trainer is None:
            raise ConfigError(
                f"context.{name} was used while the run has no environments. Use it from on_start to on_checkpoint, "
                "not in on_end or on_close."
            )
        return self.trainer

    def go_back(self, progress: Progress) -> None:
        """Takes the progress at the last checkpoint, where the run starts again, and forgets what was measured since.

        The best return stays: it is that of the weights in ``best.pt``.
        """
        progress.best_return = self.progress.best_return
        self.progress, self.line = progress, MetricsLine()
        self.logged.clear()

    def add(self, iteration: Iteration) -> None:
        """Counts an iteration."""
        self.progress.add(iteration.stats)
        self.iteration = iteration
        self.line.add(iteration)
        self.metrics = self.line.metrics(self.progress)

    def add_evaluation(self, evaluation: Evaluation, weights: NDArray[np.float32], seconds: float) -> None:
        """Takes an evaluation of the present weights.

        Args:
            evaluation: The episodes.
            weights: The acting weights, ``float32 [P]``.
            seconds: How long it took.
        """
        if evaluation.num_cut and not self.progress.has_cut:
            self.progress.has_cut = True
            logger.warning(
                "%d of %d episodes of an evaluation were cut: they did not end within %s steps. They count with the "
                "rewards so far. Wrap the environment in gymnasium.wrappers.TimeLimit, or set eval_max_episode_steps",
                evaluation.num_cut,
                len(evaluation.lens),
                f"{evaluation.lens.max():,}",
            )
        self.evaluation, self.weights = evaluation, weights
        self.is_best = self.progress.add_evaluation(evaluation.return_mean)
        self.line.add_evaluation(evaluation, seconds)
        self.metrics = self.line.metrics(self.progress)

    def end_line(self, callbacks: Sequence[Any]) -> None:
        """Lets callbacks write the metrics since the last line, with what they have logged."""
        self.metrics |= self.logged
        self.logged.clear()
        call(callbacks, "on_log", self)
        self.line = MetricsLine()

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
            value: A number, also one of NumPy or torch; NaN and infinity become null in ``metrics.jsonl``.

        Raises:
            ConfigError: The value is not a number, or the run has ended, so that no line follows.
        """
        if self.result is not None:
            raise ConfigError(
                f"log({name!r}, ...) was called in on_end, after the last line of metrics. Log in on_iteration, "
                "on_evaluation or on_checkpoint, or write to a file in context.run_dir."
            )
        try:
            plain = value.item() if hasattr(value, "item") else value
            if not isinstance(plain, Real):
                raise TypeError
            self.logged[f"callback/{name}"] = float(plain)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
            raise ConfigError(
                f"log({name!r}, {reprlib.repr(value)}) was called. The value must be one number: log the mean, or "
                "several numbers by names of their own."
            ) from None

    def request_checkpoint(self) -> None:
        """Lets the next iteration end with a checkpoint."""
        self._wants_checkpoint = True

    def take_request(self) -> bool:
        """Returns whether a checkpoint was requested, and forgets it."""
        wanted, self._wants_checkpoint = self._wants_checkpoint, False
        return wanted


def checked_callbacks(callbacks: Any) -> list[Any]:
    """Returns callbacks as a list, also a single one.

    Raises:
        ConfigError: One of them is a class, has none of the methods of a callback, or an asynchronous one.
    """
    found = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in found:
        if isinstance(callback, type) or not has_hooks(callback):
            is_class = isinstance(callback, type)
            raise ConfigError(
                f"The callback {callback!r} is "
                f"{'a class: pass an instance' if is_class else 'no object with a method of callbacks'}. A "
                f"callback has at least one of {', '.join(HOOKS)}."
            )
        if hooks := [hook for hook in HOOKS if inspect.iscoroutinefunction(getattr(callback, hook, None))]:
            raise ConfigError(
                f"{type(callback).__name__}.{hooks[0]} is an async function, which a run does not await. Write "
                "def in place of async def; asyncio.run in it runs a coroutine."
            )
    return found


def has_hooks(value: Any) -> bool:
    """Whether an object has a method of callbacks."""
    return any(callable(getattr(value, hook, None)) for hook in HOOKS)


def call(callbacks: Sequence[Any], hook: str, context: RunContext) -> None:
    """Calls one method of each callback that has it; an exception gets a note that names the callback."""
    for callback in callbacks:
        method = getattr(callback, hook, None)
        if method is not None:
            try:
                method(context)
            except Exception as error:
                if hook == "on_start" and isinstance(error, RayvecError):
                    raise  # it says what the run can't begin with
                error.add_note(f"raised in {hook} of the callback {type(callback).__name__}")
                raise


class StopAtReturn:
    """Ends the run once the mean return reaches a value.

    With `eval_interval_steps`, that is the mean of a greedy evaluation. Without it, it is the mean of the last
    episodes of training.

    Args:
        return_mean: The value.
        num_episodes: How many episodes of training must have ended, at most 100; evaluations count whatever their
            number of episodes.
    """

    def __init__(self, return_mean: float, num_episodes: int = WINDOW) -> None:
        if check_count("num_episodes", num_episodes) > WINDOW:
            raise ConfigError(
                f"num_episodes is {num_episodes}. It must be at most {WINDOW}: a run stores the returns of its "
                f"last {WINDOW} episodes."
            )
        if not _is_number(return_mean):
            raise ConfigError(f"return_mean is {return_mean!r}. It must be a number, for example StopAtReturn(475.0).")
        self._return_mean, self._num_episodes = return_mean, num_episodes

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


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not math.isnan(value)


class BestModel:
    """Writes ``best.pt``, the weights of the best greedy evaluation; :func:`rayvec.load` reads it.

    A run with `eval_interval_steps` has this callback already.
    """

    def on_evaluation(self, context: RunContext) -> None:
        """Replaces the file if no evaluation before had a larger mean return."""
        if context.is_best and context.weights is not None:
            save_best(context.run_dir, context.weights, context.progress)


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
        if self._number(context.progress.steps + context.config.steps_per_iteration) > self._kept(context):
            context.request_checkpoint()

    def on_checkpoint(self, context: RunContext) -> None:
        """Keeps the checkpoint, if it is the first one since the interval has passed."""
        if self._number(context.progress.steps) <= self._kept(context):
            return
        path = context.run_dir / "checkpoints" / f"{context.progress.steps:012}.pt"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        checkpoint = context.run_dir / "checkpoint.pt"
        try:
            os.link(checkpoint, path)  # which is replaced as a whole, never changed
        except OSError:  # a file system without links
            with checkpoint.open("rb") as source, written_whole(path) as file:
                shutil.copyfileobj(source, file)
        for old in self._paths(context)[: -self._keep] if self._keep else ():
            old.unlink()

    def _number(self, steps: int) -> int:
        return steps // self._interval_steps

    def _kept(self, context: RunContext) -> int:
        """Returns the number of the last interval of which a checkpoint was kept."""
        steps = [int(path.stem) for path in self._paths(context)]
        return self._number(max((count for count in steps if count <= context.progress.steps), default=0))

    def _paths(self, context: RunContext) -> list[Path]:
        return sorted(path for path in (context.run_dir / "checkpoints").glob("*.pt") if path.stem.isdecimal())
