"""What one run of :func:`rayvec.train` is: its directory, its progress, its callbacks, and what it continues from."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.config import TrainConfig
from rayvec.config.presets import describe_preset
from rayvec.errors import LearnerError, RankLostError, WorkerLostError, counted, origin
from rayvec.training.callbacks import RunContext, TrainResult, call, checked_callbacks, has_hooks
from rayvec.training.default_callbacks import default_callbacks
from rayvec.training.evaluation import Evaluation, evaluate, saying_where
from rayvec.training.open_trainer import open_trainer
from rayvec.training.own_env_and_network import resume_command
from rayvec.training.run_dir import begin_run_dir, load_checkpoint, locked, save_checkpoint, save_result
from rayvec.training.run_state import Progress
from rayvec.training.runs import make_eval_env, network_of
from rayvec.training.stop_signals import Interrupts
from rayvec.training.trainer import Iteration, RunTrainer

__all__ = ["Run"]

_MOST_LOSSES = 3
_MOST_LOSSES_OF_ELASTIC_RANKS = 10
"""More, since nodes may be lost while ranks start."""
_MOST_PAUSE_S = 2.0

logger = logging.getLogger(__name__)


class Run(contextlib.AbstractContextManager["Run"]):
    """A run: its directory, how far it has come, its callbacks, and the state that it continues from.

    As a context it closes the callbacks.

    Args:
        config: Settings.
        run_dir: Its directory.
        state: The state to continue from; none for a new run.
        callbacks: Callbacks to add to the default ones, or a function from these to those to use.

    Attributes:
        config: Its settings.
        context: What the callbacks see, with the progress of the run.
        is_done: Whether it has taken its steps, and the evaluation after them.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, state: dict[str, Any] | None, callbacks: Any) -> None:
        progress = Progress(**state["progress"]) if state else Progress()
        self.config, self._shown = config, run_dir
        self.run_dir = Path(os.path.abspath(run_dir))  # a callback may change the working directory
        self.context = RunContext(config, self.run_dir, progress)
        self._callbacks = all_callbacks(config, callbacks)
        self._state, self._is_new = state, state is None
        self._has_begun = self._is_open = self.is_done = False
        self._num_losses, self._cores = 0, dict[str, int]()
        self._weights: NDArray[np.float32] | None = None
        self._began_s = time.monotonic() - progress.wall_s
        self._stack = contextlib.ExitStack()

    # From the start of environments to the start of the callbacks.

    @contextlib.contextmanager
    def open_trainer(self) -> Iterator[RunTrainer]:
        """Yields what makes the iterations, from the state of the run; the callbacks reach it within the block."""
        state, self._state = self._state, None
        if state is None and not self._is_new:
            state = load_checkpoint(self.run_dir, "checkpoint.pt")
        progress, fewer = self.context.progress, self._num_losses > 0
        self._is_open = False
        with open_trainer(self.config, progress, state, fewer=fewer, cores=self._cores) as trainer:
            del state
            self._is_open, self.context.trainer = True, trainer
            if progress.learning_rate is not None:
                trainer.set_learning_rate(progress.learning_rate)
            try:
                yield trainer
            finally:
                self.context.trainer = None

    def start(self, trainer: RunTrainer) -> None:
        """Makes the directory of a new run, and starts the callbacks. If one refuses, there is no directory."""
        with contextlib.ExitStack() as undo:
            if self._is_new:
                begin_run_dir(self.run_dir, self.config, self._complete(trainer.state()))
                undo.callback(shutil.rmtree, self.run_dir, ignore_errors=True)
                undo.callback(self._close)
                self._stack.enter_context(locked(self.run_dir))
                if text := describe_preset(self.config):
                    print(text, file=sys.stderr)
            elif not self._has_begun and self.context.progress.steps >= self.config.total_steps:
                follows = "; only the evaluation follows" if self.config.eval_episodes else ""
                print(
                    f"rayvec: the run has taken all its {self.context.progress.steps:,} steps{follows}", file=sys.stderr
                )
            self._call("on_start")
            undo.pop_all()
        self._is_new, self._has_begun = False, True

    def _complete(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a trainer with the progress."""
        self.context.progress.wall_s = time.monotonic() - self._began_s
        return {**state, "progress": asdict(self.context.progress)}

    # From iteration to iteration.

    def has_more(self, interrupts: Interrupts) -> bool:
        """Whether an iteration should follow: no callback and no signal has stopped the run."""
        is_stopped = interrupts.requested or self.context.stop_reason is not None
        return self.context.progress.steps < self.config.total_steps and not is_stopped

    def is_last(self, interrupts: Interrupts) -> bool:
        """Whether no iteration should follow the next one."""
        last_step = self.context.progress.steps + self.config.steps_per_iteration
        return not self.has_more(interrupts) or last_step >= self.config.total_steps

    def add(self, iteration: Iteration) -> None:
        """Counts an iteration and calls the callbacks; one that fails loses nothing of the training."""
        context = self.context
        context.add(iteration)
        try:
            self._call("on_iteration")
            if iteration.evaluation is not None:
                self._call("on_evaluation")
            if context.line.is_complete(self.config.log_interval_steps):
                context.end_line(self._callbacks)
        except Exception:
            if iteration.state is not None:
                save_checkpoint(self.run_dir, self._complete(iteration.state))
            raise
        if iteration.state is not None:
            self.save(iteration.state)

    def save(self, state: dict[str, Any]) -> None:
        """Makes a checkpoint."""
        self.context.state, self._weights = self._complete(state), state["weights"].numpy()
        self._call("on_checkpoint")
        self.context.state, self._num_losses = {}, 0  # the state of SAC is large

    def _call(self, hook: str) -> None:
        call(self._callbacks, hook, self.context)

    def recovers(self, error: Exception) -> bool:
        """Goes back to the last checkpoint, from which new ranks continue; returns whether that can help.

        It can where ranks were lost, or where an environment raises while they restart and ``on_env_error="restart"``.

        Args:
            error: What ended the ranks, or kept them from starting again.

        Raises:
            LearnerError: Ranks are lost again and again, or before the first checkpoint.
        """
        is_of_env = isinstance(error, WorkerLostError) or "environment" in origin(error)
        may_restart = self._has_begun and not self._is_open and self.config.on_env_error == "restart"
        restarts = may_restart and is_of_env
        if not isinstance(error, RankLostError) and not restarts:
            return False
        self._num_losses += 1
        is_elastic = isinstance(self.config.num_nodes, tuple)
        most = _MOST_LOSSES_OF_ELASTIC_RANKS if is_elastic else _MOST_LOSSES
        if self._num_losses > most or (self._is_new and not is_elastic):
            if not isinstance(error, RankLostError):
                return False
            often = (
                "as they started" if self._is_new else f"{counted(self._num_losses, 'time')} since the last checkpoint"
            )
            raise LearnerError(
                f"The run's ranks were lost {often}, at last: {error} Read what the rank printed, or look for what "
                "ends it, such as too little memory."
            ) from error
        before = self.context.progress.steps
        self._state = None if self._is_new else load_checkpoint(self.run_dir, "checkpoint.pt")
        progress = Progress(**self._state["progress"]) if self._state else Progress()
        self.context.go_back(progress)
        said = f"{error}, raised in {where}" if (where := origin(error)) else str(error)
        logger.warning("restarting all ranks at step %d of %d: %s", progress.steps, before, said)
        time.sleep(min(_MOST_PAUSE_S, self._num_losses - 1))  # Ray lists a node for a while after it is gone
        return True

    # The end.

    def evaluate(self, trainer: RunTrainer) -> None:
        """Plays the evaluation after training, and writes the result: a Ctrl-C in what follows does not lose it."""
        context, began_s = self.context, time.monotonic()
        if context.line.steps:
            context.end_line(self._callbacks)
        if self.config.eval_episodes:
            print(f"rayvec: evaluating up to {counted(self.config.eval_episodes, 'episode')}", file=sys.stderr)
        with saying_where():
            evaluation = self._evaluated(trainer)
        if len(evaluation.returns) and self._weights is not None:
            context.add_evaluation(evaluation, self._weights, time.monotonic() - began_s)
            self._call("on_evaluation")
        self._save_result()
        self.is_done = True

    def _evaluated(self, trainer: RunTrainer) -> Evaluation:
        """Plays in the environments of the training, or in others if the settings name some."""
        config = self.config
        if config.eval_episodes == 0 or (config.eval_env is None and not config.eval_env_kwargs):
            return trainer.evaluate()
        assert self._weights is not None
        with make_eval_env(config, is_final=True) as env:
            module = network_of(config, env.single_observation_space, env.single_action_space)
            return evaluate(config, env, module, self._weights, seed=config.eval_seed())

    def end(self) -> TrainResult:
        """Returns the totals of the run, and keeps them in its directory."""
        self.context.result = self._save_result()
        self._call("on_end")
        return self.context.result

    def _save_result(self) -> TrainResult:
        """Writes the totals of the run up to now; returns them."""
        context, evaluation = self.context, self.context.evaluation
        if context.progress.steps >= self.config.total_steps:
            context.stop_reason = None  # the run had taken all its steps
        returns = [] if evaluation is None else evaluation.returns.tolist()
        mean = math.nan if evaluation is None else evaluation.return_mean
        run_dir = self._shown if os.path.abspath(self._shown) == str(self.run_dir) else self.run_dir
        wall_s = time.monotonic() - self._began_s
        result = TrainResult(run_dir, context.progress.steps, wall_s, mean, context.stop_reason)
        save_result(self.run_dir, self.config, asdict(result), returns)
        return result

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Closes the callbacks, all of them. If the run fails, a callback that does too is only logged."""
        self.context.error = error
        failures = self._close() if self._has_begun else []
        self._stack.close()
        for failure in failures:
            if error is None:
                raise failure
            if str(failure) != str(error):
                logger.warning("the end of the run: %s", failure)

    def _close(self) -> list[Exception]:
        """Ends the last line of metrics, and closes the callbacks; returns what they raise."""
        closing = [partial(call, [each], "on_close", self.context) for each in reversed(self._callbacks)]
        if self.context.line.steps:
            closing.insert(0, partial(self.context.end_line, self._callbacks))
        failures = []
        for close in closing:
            try:
                close()
            except Exception as failure:
                failures.append(failure)
        return failures

    @property
    def how_to_resume(self) -> str:
        """The command that resumes the run, or a sentence that there is no checkpoint, or no directory."""
        if (self.run_dir / "checkpoint.pt").exists():
            return f"resume with: {resume_command(self.config, self._shown)}"
        if not self.run_dir.is_dir():
            return f"the directory {self._shown} no longer exists"
        return f"{self._shown} has no checkpoint to resume from"

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Adds a note that says how to resume to every error and interrupt that passes once the run has begun."""
        try:
            yield
        except BaseException as error:
            if self._has_begun and (note := self.how_to_resume) not in str(error):
                error.add_note(note)
            raise


def all_callbacks(config: TrainConfig, callbacks: Any) -> list[Any]:
    """Returns the callbacks of a run: the default ones and a user's, or what a function of the default ones returns.

    Raises:
        ConfigError: One of them is no callback.
    """
    defaults = default_callbacks(config)
    is_function = callable(callbacks) and not isinstance(callbacks, type) and not has_hooks(callbacks)
    return checked_callbacks(callbacks(defaults)) if is_function else [*defaults, *checked_callbacks(callbacks)]
