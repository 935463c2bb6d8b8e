"""The training loop: collect steps, update the learner, publish its weights; the same for every algorithm."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayvec.config import TrainConfig
from rayvec.data.global_random import global_seed
from rayvec.errors import ConfigError
from rayvec.learners.base import check_gpu
from rayvec.training.atomic_files import local_path
from rayvec.training.callbacks import TrainResult
from rayvec.training.evaluation import saying_where
from rayvec.training.own_env_and_network import with_own_parts
from rayvec.training.run import Run
from rayvec.training.run_dir import best_return, free_run_dir, load_result, load_run, locked, save_config
from rayvec.training.stop_signals import Interrupts
from rayvec.training.trainer import RunTrainer

__all__ = ["resume", "train"]

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
        Exception: What a callback raised, or an environment or a network; theirs has a ``__cause__`` that says where.
        LearnerError: A loss or a gradient was not finite, or a rank was lost. Like every error of a run that has
            begun, it has a note that says how to resume from the last checkpoint.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to resume.
    """
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

    Weights, optimizer, schedule, counters and random states are exactly those of the checkpoint. The
    environments begin new episodes, with seeds that depend on the steps taken up to the checkpoint. A run that a
    callback ended continues to its last step.

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
        ConfigError: `run_dir` is not the directory of a run, another process trains in it, or a change is of
            what is learned.
        CheckpointError: Its checkpoint is missing or damaged.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to resume.
    """
    run_dir = local_path(run_dir)
    with locked(run_dir):
        config, state = load_run(run_dir)
        progress = state["progress"]
        known = (progress.get("best_return"), best_return(run_dir))  # the checkpoint may be older than best.pt
        progress["best_return"] = max((each for each in known if each is not None), default=None)
        with contextlib.suppress(ConfigError):  # the result has the time of the evaluation, the checkpoint has not
            result = load_result(run_dir)
            if result.get("total_steps") == progress["steps"]:
                progress["wall_s"] = max(progress["wall_s"], result.get("wall_s", 0.0))
        before, config = config, with_own_parts(config.adjusted(**changes), env, network, eval_env, begun=True)
        if config.total_steps != before.total_steps:
            save_config(run_dir, replace(before, total_steps=config.total_steps))
        return _run(config, run_dir, state, callbacks)


def _run(config: TrainConfig, run_dir: Path, state: dict[str, Any] | None, callbacks: Any) -> TrainResult:
    """Trains until the run is done. Where ranks are lost, or their nodes change, it starts again at a checkpoint."""
    if config.learner_device != "cpu" and config.learner_mode == "driver":
        check_gpu()
    run, interrupts = Run(config, run_dir, state, callbacks), Interrupts()
    del state
    steps = run.context.progress.steps
    with run.noting(), global_seed(config.seed, steps, 2), interrupts, interrupts.taking_sigterm(), run:
        while not run.is_done:
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
            except Exception as error:
                if not run.recovers(error):
                    raise
            if interrupts.requested:
                raise interrupts.stopped(f"stopped after {run.context.progress.steps:,} steps; {run.how_to_resume}")
        return run.end()


def _iterate(run: Run, trainer: RunTrainer, interrupts: Interrupts) -> None:
    """Makes iterations until the run has taken its steps, a callback or a signal stops it, or the nodes change."""
    is_saved = False
    while trainer.has_pending or (run.has_more(interrupts) and not trainer.is_outdated):
        is_last = run.is_last(interrupts) or trainer.is_outdated
        is_saved = run.context.take_request() or is_last
        with saying_where():
            iteration = trainer.iterate(ahead=not is_last, keep=is_saved)  # collect, update, publish
        run.add(iteration)  # calls the callbacks
    if not is_saved:
        run.save(trainer.state())
