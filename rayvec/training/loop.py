"""The training loop: collect steps, update the learner, publish its weights; the same for every algorithm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayvec.config import TrainConfig
from rayvec.training.evaluation import evaluate, greedy_policy
from rayvec.training.interrupts import Interrupts
from rayvec.training.loggers import RunLogger
from rayvec.training.progress import Progress, begin_collecting, state_of
from rayvec.training.run_dir import begin_run_dir, free_run_dir, load_run, locked, save_checkpoint, save_result
from rayvec.training.runs import open_env, open_learner

__all__ = ["TrainResult", "resume", "train"]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Totals of a finished run.

    Attributes:
        run_dir: The directory of the run.
        total_steps: Environment steps taken.
        wall_s: Wall time in seconds, with the start of the environments and the evaluation; for a resumed run, the
            time up to the checkpoint plus the time since.
        eval_return_mean: Mean return of the greedy evaluation; NaN without one.
    """

    run_dir: Path
    total_steps: int
    wall_s: float
    eval_return_mean: float


def train(config: TrainConfig) -> TrainResult:
    """Trains an agent, evaluates it, and keeps everything in a new run directory.

    If `num_nodes` is unset, the environments run on Ray where Ray is initialised or an address is given
    (``config.address`` or ``RAY_ADDRESS``), and else on this machine without Ray. A line on standard error says which.

    The first Ctrl-C ends training after the current iteration, with a checkpoint. A second one ends it at once.

    Args:
        config: Settings; their class decides which learner is used.

    Raises:
        ConfigError: The settings can't work, or the directory exists.
        LearnerError: A loss or a gradient was not finite, or a rank was lost. Like every error of a run that has
            begun, it has a note that says how to resume from the last checkpoint.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to resume.
    """
    return _run(config, free_run_dir(config), None)


def resume(run_dir: Path | str, **changes: Any) -> TrainResult:
    """Resumes a run from its last checkpoint.

    Weights, optimizer, schedule, counters and random states are exactly those of the checkpoint. The
    environments begin new episodes, with seeds that depend on the steps taken up to the checkpoint.

    Args:
        run_dir: Directory of the run.
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
        return _run(config.adjusted(**changes), run_dir, state)


def _run(config: TrainConfig, run_dir: Path, state: dict[str, Any] | None) -> TrainResult:
    progress = Progress(**state["progress"]) if state else Progress()
    began_s = time.monotonic() - progress.wall_s
    how_to_resume = f"resume with: rayvec train {config.algorithm} --resume {run_dir}"
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        env = stack.enter_context(open_env(config))
        learner = stack.enter_context(open_learner(config, env))
        collector = begin_collecting(config, env, learner, progress, state)

        def checkpoint() -> dict[str, Any]:
            progress.wall_s = time.monotonic() - began_s
            return state_of(learner, collector, progress)

        interrupts.check()
        if state is None:
            begin_run_dir(run_dir, config, checkpoint())
            stack.enter_context(locked(run_dir))
        stack.enter_context(noting(how_to_resume))
        logger = stack.enter_context(RunLogger(run_dir, config, steps=progress.steps))
        with interrupts.deferred():
            saved_s = time.monotonic()
            while progress.steps < config.total_steps and not interrupts.requested:
                laps = Laps()
                is_last = progress.steps + config.steps_per_iteration >= config.total_steps
                batch = collector.collect(n_step=config.steps_per_iteration, ahead=not is_last)
                laps.end("collect")
                metrics = learner.update(batch)
                laps.end("learn")
                if metrics:
                    collector.set_weights(learner.weights())
                    laps.end("publish")

                progress.add(batch.stats)
                logger.log(progress.steps, batch.stats, metrics, laps.times_s)
                if time.monotonic() - saved_s >= config.checkpoint_interval_s:
                    save_checkpoint(run_dir, checkpoint())
                    saved_s = time.monotonic()
            save_checkpoint(run_dir, checkpoint())
        if not interrupts.requested:
            collector.close()
            policy, seed = greedy_policy(learner.module, learner.weights()), config.eval_seed()
            evaluation = evaluate(env, policy, config.eval_episodes, seed=seed, inference=config.inference)
            logger.log_evaluation(progress.steps, evaluation.return_mean)
    if interrupts.requested:
        raise KeyboardInterrupt(f"stopped after {progress.steps:,} steps; {how_to_resume}")
    result = TrainResult(run_dir, progress.steps, time.monotonic() - began_s, evaluation.return_mean)
    save_result(run_dir, config, asdict(result), evaluation.returns.tolist())
    return result


class Laps:
    """Wall time by activity, in seconds."""

    def __init__(self) -> None:
        self.times_s: dict[str, float] = {}
        self._began_s = time.monotonic()

    def end(self, activity: str) -> None:
        """Gives the time since the last call, or since the start, to `activity`."""
        now_s = time.monotonic()
        self.times_s[activity] = now_s - self._began_s
        self._began_s = now_s


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    """Adds a note to every error and interrupt that passes."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(note)
        raise
