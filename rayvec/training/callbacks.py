"""Callbacks: objects that see a run while it trains, and can end it.

A callback has any of the methods `on_iteration`, `on_evaluation`, `on_checkpoint` and `on_end`. Each is called with
the :class:`RunContext` of the run, in the process that called :func:`rayvec.train`.
"""

from __future__ import annotations

import inspect
import math
import os
import reprlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rayvec.config import TrainConfig
from rayvec.errors import ConfigError, check_count
from rayvec.training.atomic_files import written_whole
from rayvec.training.evaluation import Evaluation
from rayvec.training.run_dir import save_best
from rayvec.training.run_state import WINDOW, Progress

if TYPE_CHECKING:
    from rayvec.training.loop import TrainResult
    from rayvec.training.trainer import Iteration

__all__ = ["HOOKS", "BestModel", "CheckpointHistory", "RunContext", "StopAtReturn", "call", "checked_callbacks"]

HOOKS = ("on_iteration", "on_evaluation", "on_checkpoint", "on_end")
"""The methods that a callback may have."""


@dataclass
class RunContext:
    """What a callback sees of a run, and how it can end the run.

    Attributes:
        config: The settings.
        run_dir: The directory of the run.
        progress: How far the run has come: ``steps``, ``episodes``, ``iterations``; returns and lengths of the last
            100 episodes; mean returns of the latest and of the best evaluation.
        iteration: What the latest iteration did: ``stats`` of its steps, ``times_s``, and others.
        metrics: The metrics since the last line of ``metrics.jsonl``, by the names that they have there.
        evaluation: The latest greedy evaluation; None before the first one.
        is_best: Whether its mean return is larger than that of every evaluation before.
        weights: The acting weights that were evaluated, ``float32 [P]``.
        stop_reason: Why the run ends early; None while it does not.
        result: The totals of the run; None until `on_end`.
        logged: Numbers that callbacks have logged since the last line, by their names there; see :meth:`log`.
    """

    config: TrainConfig
    run_dir: Path
    progress: Progress
    iteration: Iteration | None = None
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    is_best: bool = False
    weights: NDArray[np.float32] | None = None
    stop_reason: str | None = None
    result: TrainResult | None = None
    logged: dict[str, float] = field(default_factory=dict)
    _wants_checkpoint: bool = False

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
        if isinstance(callback, type) or not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
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


def call(callbacks: Sequence[Any], hook: str, context: RunContext) -> None:
    """Calls one method of each callback that has it; an exception gets a note that names the callback."""
    for callback in callbacks:
        method = getattr(callback, hook, None)
        if method is not None:
            try:
                method(context)
            except Exception as error:
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
