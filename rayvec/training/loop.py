"""The training loop: collect steps, update the learner, publish its weights; the same for every algorithm."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayvec.config import TrainConfig
from rayvec.data.global_random import global_seed
from rayvec.data.topology import Topology
from rayvec.errors import (
    ConfigError,
    LearnerError,
    RankLostError,
    RayvecError,
    WorkerLostError,
    counted,
    origin,
)
from rayvec.learners.base import check_gpu
from rayvec.pools.in_process_base import captured
from rayvec.training.callbacks import BestModel, RunContext, call, checked_callbacks
from rayvec.training.evaluation import Evaluation, Evaluator, open_evaluator
from rayvec.training.loggers import RunLogger
from rayvec.training.open_trainer import open_trainer
from rayvec.training.own_env_and_network import resume_command, with_own_parts
from rayvec.training.plots import draw_learning_curve
from rayvec.training.ray_metrics import RayMetrics
from rayvec.training.run_dir import (
    begin_run_dir,
    best_return,
    free_run_dir,
    load_checkpoint,
    load_result,
    load_run,
    locked,
    save_checkpoint,
    save_result,
)
from rayvec.training.run_state import Progress
from rayvec.training.stop_signals import Interrupts
from rayvec.training.trainer import Iteration, RunTrainer
from rayvec.training.wandb_run import import_wandb, wandb_run

__all__ = ["TrainResult", "resume", "train"]

_MOST_LOSSES = 3
_MOST_LOSSES_OF_ELASTIC_RANKS = 10
"""More, since nodes may be lost while ranks start."""
_MOST_PAUSE_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Totals of a finished run.

    Attributes:
        run_dir: The directory of the run.
        total_steps: Environment steps taken.
        wall_s: Wall time in seconds, with the start of the environments and the evaluation; for a resumed run, the
            time up to the checkpoint plus the time since. If the run had finished, it includes its earlier evaluation.
        eval_return_mean: Mean return of the greedy evaluation; NaN without one.
        stop_reason: Why a callback ended the run; None if the run took all its steps.
    """

    run_dir: Path
    total_steps: int
    wall_s: float
    eval_return_mean: float
    stop_reason: str | None = None


def train(
    config: TrainConfig,
    *,
    env: Any = None,
    network: Callable[..., Any] | None = None,
    callbacks: Sequence[Any] = (),
) -> TrainResult:
    """Trains an agent, evaluates it, and keeps everything in a new run directory.

    If `num_nodes` is unset, the environments run on Ray where Ray is initialised or an address is given
    (``config.address`` or ``RAY_ADDRESS``), and else on this machine without Ray. A line on standard error says which.

    The first Ctrl-C or SIGTERM ends training after the current iteration, with a checkpoint. A second one ends it at
    once. After SIGTERM the exception is `rayvec.training.stop_signals.Terminated`, a KeyboardInterrupt.

    Args:
        config: Settings; their class decides which learner is used.
        env: The environment, in place of ``config.env_id``: an id, a spec, or a class or function that makes one.
        network: Function or class, called with (observation space, action space, settings), that makes the torch
            module to train, in place of ``config.network``.
        callbacks: Objects with any of the methods ``on_iteration``, ``on_evaluation``, ``on_checkpoint`` and
            ``on_end``, each called with a :class:`rayvec.RunContext`. A run that ends by an error or a signal does
            not call ``on_end``.

    Raises:
        ConfigError: The settings can't work, the directory exists, or a callback has none of the methods.
        Exception: What a callback raised, or an environment or a network; theirs has a ``__cause__`` that says where.
        LearnerError: A loss or a gradient was not finite, or a rank was lost. Like every error of a run that has
            begun, it has a note that says how to resume from the last checkpoint.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to resume.
    """
    config = with_own_parts(config, env, network)
    return _run(config, free_run_dir(config), None, callbacks)


def resume(
    run_dir: Path | str,
    *,
    env: Any = None,
    network: Callable[..., Any] | None = None,
    callbacks: Sequence[Any] = (),
    **changes: Any,
) -> TrainResult:
    """Resumes a run from its last checkpoint.

    Weights, optimizer, schedule, counters and random states are exactly those of the checkpoint. The
    environments begin new episodes, with seeds that depend on the steps taken up to the checkpoint. A run that a
    callback ended continues to its last step.

    Args:
        run_dir: Directory of the run.
        env: The environment of the run, where it was passed in Python and has no name.
        network: The network of the run, likewise.
        callbacks: As of :func:`rayvec.train`; those of the run before are not kept.
        changes: Settings of :data:`rayvec.config.ADJUSTABLE` to use in place of the run's own.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, another process trains in it, or a change is of
            what is learned.
        CheckpointError: Its checkpoint is missing or damaged.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to resume.
    """
    run_dir = Path(run_dir)
    with locked(run_dir):
        config, state = load_run(run_dir)
        progress = state["progress"]
        known = (progress.get("best_return"), best_return(run_dir))  # the checkpoint may be older than best.pt
        progress["best_return"] = max((each for each in known if each is not None), default=None)
        with contextlib.suppress(ConfigError):  # the result has the time of the evaluation, the checkpoint has not
            result = load_result(run_dir)
            if result.get("total_steps") == progress["steps"]:
                progress["wall_s"] = max(progress["wall_s"], result.get("wall_s", 0.0))
        config = with_own_parts(config.adjusted(**changes), env, network, begun=True)
        return _run(config, run_dir, state, callbacks)


def _run(config: TrainConfig, run_dir: Path, state: dict[str, Any] | None, callbacks: Sequence[Any]) -> TrainResult:
    if config.track is not None:
        import_wandb()
    if config.learner_device != "cpu" and config.learner_mode == "driver":
        check_gpu()
    checked = checked_callbacks(callbacks)
    shown, run_dir = run_dir, Path(os.path.abspath(run_dir))  # a callback may change the working directory
    with contextlib.ExitStack() as stack:
        run = _Run(config, run_dir, shown, state, checked)
        stack.enter_context(run.noting())
        stack.enter_context(global_seed(config.seed, run.context.progress.steps, 2))
        interrupts = stack.enter_context(Interrupts())
        stack.enter_context(interrupts.taking_sigterm())
        with run.drawing():
            is_done = _train_with_any_ranks(run, interrupts, stack)
        if is_done:
            return run.end()
        raise interrupts.stopped(f"stopped after {run.context.progress.steps:,} steps; {run.how_to_resume}")


def _train_with_any_ranks(run: _Run, interrupts: Interrupts, stack: contextlib.ExitStack) -> bool:
    """Trains until the run is done or should stop, with one set of ranks after the other as they are lost or placed.

    Returns:
        Whether the run is done.
    """
    is_done, cores = False, dict[str, int]()
    while not is_done and not interrupts.requested:
        progress, is_open = run.context.progress, False
        try:
            state = run.last_state()
            with open_trainer(run.config, progress, state, fewer=run.num_losses > 0, cores=cores) as trainer:
                is_open = True
                interrupts.check()
                run.open_tracker(stack)
                del state
                if not run.has_dir:
                    run.begin(trainer.state())
                    stack.enter_context(locked(run.run_dir))
                is_done = run.train(trainer, interrupts)
            if not is_done and not interrupts.requested:
                logger.warning("nodes joined or leave: ranks are placed again at step %d", progress.steps)
        except RankLostError as error:
            run.lose_ranks(error)
        except Exception as error:
            if is_open or not run.restarts_after(error):
                raise
            run.lose_ranks(error)
    return is_done


@contextlib.contextmanager
def _saying_where() -> Iterator[None]:
    """Lets what a network raises in this process say so, as ranks and workers do: its ``__cause__`` is an `EnvError`.

    What says already where it was raised stays as it is, and so do ``sys.exit()``, which may be that of a signal
    handler of the caller, and whatever else is no ``Exception``.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RayvecError) or isinstance(error.__cause__, RayvecError):
            raise
        raise captured(error, Topology.this_process).rebuild()  # noqa: B904  # rebuild() sets the cause


class _Run:
    """A run: its directory, how far it has come, and the state that it continues from when ranks are lost.

    Args:
        config: Settings.
        run_dir: Its directory.
        shown: The same, as messages and the result name it.
        state: The state to continue from; none for a new run.
        callbacks: Each may end the run.

    Attributes:
        config: Its settings.
        run_dir: Its directory.
        context: What the callbacks see, with the progress of the run.
        has_dir: Whether it has its directory, with a checkpoint.
        num_losses: How often ranks were lost since the last checkpoint.
        has_begun: Whether it has made its directory, or, for a resumed run, whether its loop has started.
    """

    def __init__(
        self, config: TrainConfig, run_dir: Path, shown: Path, state: dict[str, Any] | None, callbacks: Sequence[Any]
    ) -> None:
        progress = Progress(**state["progress"]) if state else Progress()
        self.context = RunContext(config, run_dir, progress)
        self._state, self.has_dir = state, state is not None
        self.num_losses = 0
        self.has_begun = False
        self.config, self.run_dir, self._shown = config, run_dir, shown
        own = [RayMetrics()] if config.eval_interval_steps is None else [RayMetrics(), BestModel()]
        self._callbacks = [*own, *callbacks]
        self._is_tracked = False
        self._greedy: tuple[int, float] | None = None
        self._saved_s = time.monotonic()
        self._began_s = self._saved_s - progress.wall_s

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
            if self.has_begun and (note := self.how_to_resume) not in str(error):
                error.add_note(note)
            raise

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Draws the learning curve once the block ends. If the block raises, a failure to draw is only logged."""
        try:
            yield
        except BaseException as error:
            try:
                self._draw()
            except Exception as other:
                if str(other) != str(error):
                    logger.warning("the learning curve of the run can't be drawn: %s", other)
            raise
        self._draw()

    def _draw(self) -> None:
        if self.has_begun:
            draw_learning_curve(self.run_dir, self.config.title, self._greedy)

    def open_tracker(self, stack: contextlib.ExitStack) -> None:
        """Opens the tracker, if there is one and it is not open yet; `stack` closes it."""
        if not self._is_tracked:
            self._is_tracked, progress = True, self.context.progress
            opened = wandb_run(self.config, self.run_dir, progress.tracker_run)
            progress.tracker_run = stack.enter_context(opened)

    def last_state(self) -> dict[str, Any] | None:
        """Returns the state to continue from: of a resumed run, or of the last checkpoint; None for a new run."""
        state, self._state = self._state, None
        return load_checkpoint(self.run_dir, "checkpoint.pt") if state is None and self.has_dir else state

    def begin(self, state: dict[str, Any]) -> None:
        """Makes the directory of a new run."""
        begin_run_dir(self.run_dir, self.config, self._complete(state))
        self.has_dir = self.has_begun = True
        if self.config.preset != "none":
            print(f"rayvec: settings of the preset {self.config.preset}", file=sys.stderr)

    def _complete(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a trainer with the progress."""
        self.context.progress.wall_s = time.monotonic() - self._began_s
        return {**state, "progress": asdict(self.context.progress)}

    def train(self, trainer: RunTrainer, interrupts: Interrupts) -> bool:
        """Makes the iterations that are left, with checkpoints and evaluations.

        Returns:
            Whether the run is done; not if Ctrl-C or SIGTERM came before, or if it should continue with other ranks.
            Then the checkpoint is of the last iteration.
        """
        config, progress = self.config, self.context.progress
        if not self.has_begun and progress.steps >= config.total_steps:
            follows = "; only the evaluation follows" if config.eval_episodes else ""
            print(f"rayvec: the run has taken all its {progress.steps:,} steps{follows}", file=sys.stderr)
        self.has_begun = True
        self._saved_s = time.monotonic()
        with (
            RunLogger(self.run_dir, config, progress, self.context.logged) as logger,
            open_evaluator(config, progress.steps) as evaluator,
        ):
            with interrupts.deferred():
                is_saved = False
                while trainer.has_pending or (self._has_more(interrupts) and not trainer.is_outdated):
                    is_saved = self._iterate(trainer, interrupts, evaluator, logger)
                if not is_saved:
                    self._save(trainer.state())
                if self._has_more(interrupts):
                    return False
            if interrupts.requested:
                return False
            if config.eval_episodes:
                print(f"rayvec: evaluating up to {counted(config.eval_episodes, 'episode')}", file=sys.stderr)
            with _saying_where():
                evaluation = trainer.evaluate()
            if len(evaluation.returns):
                self._greedy = (progress.steps, evaluation.return_mean)
                self._evaluated(evaluation, self._weights)
            logger.log_evaluation(evaluation)
            self._save_result()  # before the learning curve is drawn: a Ctrl-C there does not lose the evaluation
        return True

    def _iterate(
        self, trainer: RunTrainer, interrupts: Interrupts, evaluator: Evaluator | None, logger: RunLogger
    ) -> bool:
        """Makes an iteration, evaluates and saves its weights where that is due; returns whether it saved them."""
        config, progress = self.config, self.context.progress
        last_step = progress.steps + config.steps_per_iteration
        is_end = self._ends(interrupts) or last_step >= config.total_steps
        is_last = is_end or trainer.is_outdated
        is_evaluated = evaluator is not None and evaluator.is_due(last_step) and not is_end
        is_late = time.monotonic() - self._saved_s >= config.checkpoint_interval_s
        is_saved = self.context.take_request() or is_late or is_last or is_evaluated
        with _saying_where():
            iteration = trainer.iterate(ahead=not is_last, keep=is_saved, evaluate=is_evaluated)
        progress.add(iteration.stats)
        try:
            if evaluator is not None and iteration.weights is not None:
                began_s = time.monotonic()
                with _saying_where():
                    iteration.evaluation = evaluator.evaluate(progress.steps, iteration.weights)
                iteration.times_s["evaluate"] = time.monotonic() - began_s
        except Exception:
            self._keep(iteration, logger)  # an evaluation that fails loses nothing of the training
            raise
        self._keep(iteration, logger)
        return is_saved

    def _keep(self, iteration: Iteration, logger: RunLogger) -> None:
        """Shows an iteration to the logger and the callbacks, and saves its state if it has one."""
        self.context.iteration, self.context.metrics = iteration, logger.add(iteration)
        self._call("on_iteration")
        self._evaluated(iteration.evaluation, iteration.weights)
        logger.end_line()
        if iteration.state is not None:
            self._save(iteration.state)
            self.num_losses = 0

    def _has_more(self, interrupts: Interrupts) -> bool:
        """Whether an iteration should follow."""
        return self.context.progress.steps < self.config.total_steps and not self._ends(interrupts)

    def _ends(self, interrupts: Interrupts) -> bool:
        """Whether Ctrl-C, SIGTERM or a callback asked to end the run."""
        return interrupts.requested or self.context.stop_reason is not None

    def _evaluated(self, evaluation: Evaluation | None, weights: NDArray[np.float32] | None) -> None:
        """Shows an evaluation, if there was one, to the callbacks."""
        if evaluation is not None:
            context = self.context
            context.evaluation, context.weights = evaluation, weights
            context.is_best = context.progress.add_evaluation(evaluation.return_mean)
            self._call("on_evaluation")

    def _save(self, state: dict[str, Any]) -> None:
        self._weights = state["weights"].numpy()
        save_checkpoint(self.run_dir, self._complete(state))
        self._call("on_checkpoint")
        self._saved_s = time.monotonic()

    def _call(self, hook: str) -> None:
        call(self._callbacks, hook, self.context)

    def restarts_after(self, error: Exception) -> bool:
        """Whether ranks restart again after an error that was raised while they restarted: one of an environment."""
        is_of_env = isinstance(error, WorkerLostError) or "environment" in origin(error)
        return self.has_begun and self.config.on_env_error == "restart" and is_of_env

    def lose_ranks(self, error: Exception) -> None:
        """Goes back to the last checkpoint, from which a new set of ranks continues.

        Args:
            error: What ended the ranks, or kept them from starting again.

        Raises:
            LearnerError: Ranks are lost again and again, or before the first checkpoint.
            Exception: The error, if an environment raises it again and again.
        """
        self.num_losses += 1
        is_elastic = isinstance(self.config.num_nodes, tuple)
        most = _MOST_LOSSES_OF_ELASTIC_RANKS if is_elastic else _MOST_LOSSES
        if self.num_losses > most or (not self.has_dir and not is_elastic):
            if not isinstance(error, RankLostError):
                raise error
            often = (
                f"{counted(self.num_losses, 'time')} since the last checkpoint" if self.has_dir else "as they started"
            )
            raise LearnerError(
                f"The run's ranks were lost {often}, at last: {error} Read what the rank printed, or look for what "
                "ends it, such as too little memory."
            ) from error
        before = self.context.progress.steps
        best = self.context.progress.best_return  # of the weights in best.pt
        self._state = self.last_state()
        self.context.progress = Progress(**self._state["progress"]) if self._state else Progress()
        self.context.progress.best_return = best
        said = f"{error}, raised in {where}" if (where := origin(error)) else str(error)
        logger.warning("restarting all ranks at step %d of %d: %s", self.context.progress.steps, before, said)
        time.sleep(min(_MOST_PAUSE_S, self.num_losses - 1))  # Ray lists a node for a while after it is gone

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
        wall_s = time.monotonic() - self._began_s
        returns = [] if evaluation is None else evaluation.returns.tolist()
        mean = math.nan if evaluation is None else evaluation.return_mean
        run_dir = self._shown if os.path.abspath(self._shown) == str(self.run_dir) else self.run_dir
        result = TrainResult(run_dir, context.progress.steps, wall_s, mean, context.stop_reason)
        save_result(self.run_dir, self.config, asdict(result), returns)
        return result
