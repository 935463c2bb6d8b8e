"""The training loop: collect steps, update the learner, publish its weights; the same for every algorithm."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rayvec.config import TrainConfig
from rayvec.config.presets import describe_preset
from rayvec.data import EpisodeStats
from rayvec.data.global_random import global_seed
from rayvec.errors import LearnerError, RankLostError, counted, require
from rayvec.learners.base import torch_device
from rayvec.training.atomic_files import local_path
from rayvec.training.callbacks import MetricsLine, RunContext, TrainResult, call, checked_callbacks, has_hooks
from rayvec.training.default_callbacks import default_callbacks
from rayvec.training.environments import (
    environment_of,
    eval_settings,
    make_eval_env,
    served,
    wrapper_statistics,
)
from rayvec.training.evaluation import evaluate
from rayvec.training.rank_trainer import open_trainer
from rayvec.training.run_dir import (
    begin_run_dir,
    best_return,
    free_run_dir,
    load_checkpoint,
    load_config,
    load_run,
    locked,
    resume_command,
    save_config,
    save_result,
)
from rayvec.training.runs import network_of, own_torch_modes, with_own_parts
from rayvec.training.stop_signals import Interrupts
from rayvec.training.trainer import Iteration, Progress

_MAX_LOSSES = 5
"""How often ranks may be lost between two checkpoints; nodes may be lost while ranks start."""
_MAX_PAUSE_S = 2.0

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    *,
    env: Any = None,
    eval_env: Any = None,
    network: Callable[..., Any] | None = None,
    callbacks: Sequence[Any] | Callable[[list[Any]], list[Any]] = (),
) -> TrainResult:
    """Trains an agent, evaluates it, and keeps everything in a new run directory.

    If `num_nodes` is unset, the environments run on Ray where Ray is initialised or an address is given
    (``config.address`` or ``RAY_ADDRESS``), and else on this machine without Ray. A line on standard error says which.

    The first Ctrl-C or SIGTERM ends training after the current iteration, with a checkpoint. A second one ends it at
    once. After SIGTERM the exception is `rayvec.training.stop_signals.Terminated`, a KeyboardInterrupt.

    Args:
        config: Settings; their class decides which learner is used.
        env: The environment, in place of ``config.env_id``: an id, a spec, a class or function that makes one, or a
            list of one such for each environment. If it has a parameter ``env_index``, it gets the index of the
            environment, for a port or a folder of its own.
        eval_env: The environment of evaluations, in place of ``config.eval_env``, likewise.
        network: Function or class, called with (observation space, action space, settings), that makes the torch
            module to train, in place of ``config.network``.
        callbacks: Objects with any of the methods ``on_start``, ``on_iteration``, ``on_evaluation``, ``on_log``,
            ``on_checkpoint``, ``on_end`` and ``on_close``, each called with a :class:`rayvec.RunContext`, after the
            default ones; or a function from the list of the default ones to the list to use. A run that ends by an
            error or a signal does not call ``on_end``.

    Raises:
        ConfigError: The settings can't work, the directory exists, or a callback has none of the methods.
        Exception: What a callback, an environment or a network raised. In a worker or on a rank it has a ``__cause__``
            that says where.
        LearnerError: A loss or a gradient was not finite, or a rank was lost. Like every error of a run that has
            begun, it has a note that says how to resume from the last checkpoint.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to resume.
    """
    if isinstance(config, TrainConfig):
        free_run_dir(config)  # now: servers of environments may take long to dial in
    with served(config, env) as env:
        config = with_own_parts(config, env, network, eval_env)
        return _run(config, free_run_dir(config), None, callbacks)


def resume(
    run_dir: Path | str,
    *,
    env: Any = None,
    eval_env: Any = None,
    network: Callable[..., Any] | None = None,
    callbacks: Sequence[Any] | Callable[[list[Any]], list[Any]] = (),
    **changes: Any,
) -> TrainResult:
    """Resumes a run from its last checkpoint.

    Weights, optimizer, schedule, counters and random states are exactly those of the checkpoint. So are environments
    that save their state, as with the wrapper :class:`rayvec.wrappers.SaveState`, unless steps are collected ahead or
    the policy has a memory. Others begin new episodes, with seeds that depend on the steps taken up to the checkpoint.
    A run that a callback ended continues to its last step.

    Args:
        run_dir: Directory of the run.
        env: The environment of the run, where it was passed in Python and has no name.
        eval_env: The environment of its evaluations, likewise.
        network: The network of the run, likewise.
        callbacks: As of :func:`rayvec.train`; those of the run before are not kept.
        changes: Settings of :data:`rayvec.config.ADJUSTABLE` to use in place of the run's own. With `total_steps` a run
            is trained longer: the run keeps that number, and schedules, such as that of the learning rate, are those
            of a run with so many steps from the beginning.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, another process trains in it, a change is of what is
            learned, or the run has taken more than `total_steps`.
        CheckpointError: Its checkpoint is missing or damaged.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to resume.
    """
    run_dir = local_path(run_dir)
    load_config(run_dir)  # which says what is wrong with the directory
    with locked(run_dir):
        before, state = load_run(run_dir)
        state["progress"]["best_return"] = best_return(run_dir)  # of an evaluation after the checkpoint, too
        config = before.adjusted(**changes)
        require(
            config.total_steps == before.total_steps or config.total_steps >= state["progress"]["steps"],
            f"total_steps is {config.total_steps}, and the run has taken {state['progress']['steps']} steps. Pass at "
            "least as many, or leave it out.",
        )
        with served(config, env, begun=True) as env:
            config = with_own_parts(config, env, network, eval_env, begun=True)
            if config.total_steps != before.total_steps:
                save_config(run_dir, replace(before, total_steps=config.total_steps))
            return _run(config, run_dir, state, callbacks)


@own_torch_modes()
def _run(config: TrainConfig, run_dir: Path, state: dict[str, Any] | None, callbacks: Any) -> TrainResult:
    """Trains until the run is done. Where ranks are lost, or their nodes change, it starts again at a checkpoint."""
    if config.learner_mode == "driver":
        torch_device(config.learner_device)  # now: environments, or a cluster, may take long to start
    run, interrupts = _Run(config, run_dir, state, callbacks), Interrupts()
    del state  # of SAC it is large
    steps = run.context.progress.steps
    with run.noting(), global_seed(config.seed, steps, 2), interrupts, interrupts.taking_sigterm(), run:
        while run.context.result is None:
            try:
                with run.open_trainer() as trainer:
                    interrupts.check()
                    run.start(trainer)
                    with interrupts.deferred():
                        _iterate(run, trainer, interrupts)
                    if run.has_more(interrupts):
                        logger.warning("nodes joined or leave: ranks are placed again")
                    elif not interrupts.requested:
                        run.evaluate(trainer)
            except RankLostError as error:
                run.go_back(error)
            if interrupts.requested:
                raise interrupts.kind(f"stopped after {run.context.progress.steps:,} steps; {run.how_to_resume}")
        run.call("on_end")
        return run.context.result


def _iterate(run: _Run, trainer: Any, interrupts: Interrupts) -> None:
    """Makes iterations until the run has taken its steps, a callback or a signal stops it, or the nodes change."""
    context, is_saved = run.context, False
    while trainer.has_pending or (run.has_more(interrupts) and not trainer.is_outdated):
        after = context.progress.steps + context.config.steps_per_iteration
        is_last = not run.has_more(interrupts) or after >= context.config.total_steps or trainer.is_outdated
        is_saved, context.wants_checkpoint = context.wants_checkpoint or is_last, False
        run.add(trainer.iterate(ahead=not is_last, keep=is_saved))  # collect, update, publish; calls the callbacks
    if not is_saved:
        run.save(trainer.state())


class _Run(contextlib.AbstractContextManager["_Run"]):
    """A run: its directory, how far it has come, its callbacks, and the state that it continues from.

    As a context it closes the callbacks.

    Args:
        config: Settings.
        run_dir: Its directory.
        state: The state to continue from; none for a new run.
        callbacks: Callbacks to add to the default ones, or a function from these to those to use.

    Attributes:
        context: What the callbacks see, with the progress of the run, and its result once it is done.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, state: dict[str, Any] | None, callbacks: Any) -> None:
        progress = Progress(**state["progress"]) if state else Progress()
        self._config, self._run_dir = config, run_dir.absolute()  # a callback may change the working directory
        self.context = RunContext(config, self._run_dir, progress)
        is_function = callable(callbacks) and not isinstance(callbacks, type) and not has_hooks(callbacks)
        defaults = default_callbacks(config)
        self._callbacks = checked_callbacks(callbacks(defaults) if is_function else defaults)
        self._callbacks += [] if is_function else checked_callbacks(callbacks)
        self._state, self._is_new = state, state is None
        self._has_begun = False
        self._num_losses, self._cores = 0, dict[str, int]()
        self._weights = np.zeros(0, np.float32)
        self._began_s = time.monotonic() - progress.wall_s
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def open_trainer(self) -> Iterator[Any]:
        """Yields what makes the iterations, from the state of the run; the callbacks reach it within the block."""
        state, self._state = self._state, None
        if state is None and not self._is_new:
            state = load_checkpoint(self._run_dir, "checkpoint.pt")
        progress, fewer = self.context.progress, self._num_losses > 0
        with open_trainer(self._config, progress, state, fewer=fewer, cores=self._cores) as trainer:
            del state
            self.context.trainer = trainer
            if progress.learning_rate is not None:
                trainer.set_learning_rate(progress.learning_rate)
            yield trainer
        self.context.trainer = None

    def start(self, trainer: Any) -> None:
        """Makes the directory of a new run, and starts the callbacks."""
        if self._is_new and not self._has_begun:
            begin_run_dir(self._run_dir, self._config, self._complete(trainer.state()))
            self._stack.enter_context(locked(self._run_dir))
            if text := describe_preset(self._config):
                print(text, file=sys.stderr)
        elif not self._has_begun and self.context.progress.steps >= self._config.total_steps:
            print(f"rayvec: the run has taken all its {self.context.progress.steps:,} steps", file=sys.stderr)
        self._has_begun = True
        self.call("on_start")
        self._is_new = False

    def _complete(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a trainer with the progress."""
        self.context.progress.wall_s = time.monotonic() - self._began_s
        return {**state, "progress": asdict(self.context.progress)}

    def call(self, hook: str) -> None:
        """Calls a method of each callback that has it."""
        call(self._callbacks, hook, self.context)

    def has_more(self, interrupts: Interrupts) -> bool:
        """Whether an iteration should follow: no callback and no signal has stopped the run."""
        is_stopped = interrupts.requested or self.context.stop_reason is not None
        return self.context.progress.steps < self._config.total_steps and not is_stopped

    def add(self, iteration: Iteration) -> None:
        """Counts an iteration and calls the callbacks."""
        context = self.context
        context.iteration = iteration
        context.progress.add(iteration.stats)
        context.line.add(iteration)
        context.metrics = context.line.metrics(context.progress)
        self.call("on_iteration")
        if iteration.evaluation is not None:
            self.call("on_evaluation")
        has_news = iteration.state is not None or iteration.evaluation is not None
        if has_news or context.line.sums["steps"] >= self._config.log_interval_steps:
            self._end_line()
        if iteration.state is not None:
            self.save(iteration.state)

    def _end_line(self) -> None:
        """Lets callbacks write the metrics since the last line, if there are any, with what they have logged."""
        context = self.context
        if "steps" in context.line.sums:
            context.metrics |= context.logged
            context.logged.clear()
            context.line = MetricsLine()  # also if a callback raises: the line is not written again at the end
            with contextlib.ExitStack() as stack:  # if one raises, the others still write the line
                for callback in reversed(self._callbacks):
                    stack.callback(call, [callback], "on_log", context)

    def save(self, state: dict[str, Any]) -> None:
        """Makes a checkpoint."""
        self.context.state, self._weights = self._complete(state), state["weights"].numpy()
        self.call("on_checkpoint")
        self.context.state, self._num_losses = {}, 0

    def go_back(self, error: RankLostError) -> None:
        """Goes back to the last checkpoint, from which new ranks continue. The best return stays, as ``best.pt`` does.

        Raises:
            LearnerError: Ranks are lost again and again.
        """
        context = self.context
        self._num_losses += 1
        if self._num_losses > _MAX_LOSSES:
            raise LearnerError(
                f"The run's ranks were lost {counted(self._num_losses, 'time')} since the last checkpoint, at last: "
                f"{error} Read what the rank printed, or look for what ends it, such as too little memory."
            ) from error
        before, best = context.progress.steps, context.progress.best_return
        self._state = None if self._is_new else load_checkpoint(self._run_dir, "checkpoint.pt")
        progress = {**self._state["progress"], "best_return": best} if self._state else {}
        context.progress, context.line = Progress(**progress), MetricsLine()
        context.logged.clear()
        logger.warning("restarting all ranks at step %d of %d: %s", context.progress.steps, before, error)
        time.sleep(min(_MAX_PAUSE_S, self._num_losses - 1))  # Ray lists a node for a while after it is gone

    def evaluate(self, trainer: Any) -> None:
        """Plays the evaluation after training, and writes the result: a Ctrl-C in what follows does not lose it."""
        began_s = time.monotonic()
        self._end_line()
        if self._config.eval_episodes:
            print(f"rayvec: evaluating up to {counted(self._config.eval_episodes, 'episode')}", file=sys.stderr)
        evaluation = self._evaluated(trainer)
        if len(evaluation.returns):
            self.context.add_evaluation(evaluation, self._weights, time.monotonic() - began_s)
            self.call("on_evaluation")
        context, returns = self.context, evaluation.returns.tolist()
        if context.progress.steps >= self._config.total_steps:
            context.stop_reason = None  # the run had taken all its steps
        wall_s, mean = time.monotonic() - self._began_s, evaluation.return_mean
        result = TrainResult(self._run_dir, context.progress.steps, wall_s, mean, context.stop_reason)
        save_result(self._run_dir, self._config, asdict(result), returns)
        context.result = result

    def _evaluated(self, trainer: Any) -> EpisodeStats:
        """Plays in the environments of the training, or in others if the settings name some.

        Statistics that wrappers have kept in the training are in no checkpoint: they don't count in an evaluation.
        """
        config = self._config
        others = config.eval_env is not None or bool(config.eval_env_kwargs)
        if config.eval_episodes and not others and not isinstance(environment_of(config), list | tuple):
            others = bool(wrapper_statistics(self.context.env, config))
        if not (config.eval_episodes and others):
            found: EpisodeStats = trainer.evaluate()
            return found
        with make_eval_env(config, is_final=True) as env:
            module = network_of(config, env.single_observation_space, env.single_action_space)
            return evaluate(eval_settings(config), env, module, self._weights, seed=config.eval_seed())

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Closes the callbacks, all of them; what they raise is logged. A run that did not start has no directory."""
        self.context.error = error
        if self._has_begun:
            self._close()
            if self._is_new:
                shutil.rmtree(self._run_dir, ignore_errors=True)
        self._stack.close()

    def _close(self) -> None:
        """Ends the last line of metrics, and closes the callbacks."""
        closing: list[Callable[[], None]] = [self._end_line]
        closing += [partial(call, [each], "on_close", self.context) for each in reversed(self._callbacks)]
        for close in closing:
            try:
                close()
            except Exception as failure:
                logger.warning("the end of the run: %r", failure)

    @property
    def how_to_resume(self) -> str:
        """Says which command resumes the run."""
        return f"resume with: {resume_command(self._config, self._run_dir)}"

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Adds a note that says how to resume to every error and interrupt that passes once the run has begun."""
        try:
            yield
        except BaseException as error:
            if self._has_begun and not self._is_new and (note := self.how_to_resume) not in str(error):
                error.add_note(note)
            raise
