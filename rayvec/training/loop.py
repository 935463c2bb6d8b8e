"""Training: sampling, learning and weights go round, whatever the algorithm."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rayvec.collect.collector import Collector
from rayvec.config import TrainConfig
from rayvec.learners.base import Learner
from rayvec.policies.policy import Policy
from rayvec.training.evaluation import evaluate, greedy_policy
from rayvec.training.loggers import RunLogger
from rayvec.training.runs import (
    Progress,
    begin_run_dir,
    free_run_dir,
    load_run,
    locked,
    make_env,
    open_learner,
    restore,
    save_checkpoint,
    save_result,
)
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["TrainResult", "resume", "train"]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a finished run came to.

    Attributes:
        run_dir: Where everything is that the run wrote.
        total_steps: Environment steps taken.
        wall_s: Wall time in seconds, with the start of Ray and the evaluation; of a run that was resumed, the
            time up to the checkpoint and the time since.
        eval_return_mean: Mean return of the greedy evaluation; NaN without one.
    """

    run_dir: Path
    total_steps: int
    wall_s: float
    eval_return_mean: float


def train(config: TrainConfig) -> TrainResult:
    """Trains an agent and evaluates it; everything about it goes into a new directory.

    The first Ctrl-C ends training after the iteration under way, with a checkpoint; a second one at once.

    Args:
        config: Settings; their class decides what learns.

    Raises:
        ConfigError: The settings can't work, or the directory exists.
        LearnerError: A loss or a gradient was not finite, or a rank was lost. Like every error of a run that has
            begun, it has a note that says how to go on from the last checkpoint.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to go on.
    """
    return _run(config, free_run_dir(config), None)


def resume(run_dir: Path | str, **changes: Any) -> TrainResult:
    """Goes on with a run from its last checkpoint.

    Weights, optimizer, schedule, counters and random states are exactly those of the checkpoint. The
    environments begin new episodes, with seeds that depend on the steps taken up to the checkpoint.

    Args:
        run_dir: Directory of the run.
        changes: Settings of :data:`rayvec.config.ADJUSTABLE` to go on with in place of the run's own.

    Raises:
        ConfigError: `run_dir` is not the directory of a run, another process is at work in it, or a change of
            what is learned.
        CheckpointError: Its checkpoint is missing or damaged.
        KeyboardInterrupt: Training was interrupted; the message, or a note, says how to go on.
    """
    run_dir = Path(run_dir)
    with locked(run_dir):
        config, state = load_run(run_dir)
        return _run(config.adjusted(**changes), run_dir, state)


def _run(config: TrainConfig, run_dir: Path, state: dict[str, Any] | None) -> TrainResult:
    progress = Progress(**state["progress"]) if state else Progress()
    began_s = time.monotonic() - progress.wall_s
    stop = StopOnInterrupt()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_threads(config.learner_threads))
        env = stack.enter_context(make_env(config))
        stack.enter_context(ended_by_interrupt(env))
        learner = stack.enter_context(open_learner(config, env))
        collector = _begin(config, env, learner, progress, state)

        def checkpoint() -> dict[str, Any]:
            progress.wall_s = time.monotonic() - began_s
            weights = torch.from_numpy(learner.weights())
            parts = {"weights": weights, "learner": learner.state_dict(), "collector": collector.state_dict()}
            return {**parts, "progress": asdict(progress)}

        if state is None:
            begin_run_dir(run_dir, config, checkpoint())
            stack.enter_context(locked(run_dir))
        how_to_go_on = f"go on with: rayvec train {config.algorithm} --resume {run_dir}"
        stack.enter_context(noting(how_to_go_on))
        logger = stack.enter_context(RunLogger(run_dir, config, steps=progress.steps))
        with stop:
            saved_s = time.monotonic()
            while progress.steps < config.total_steps and not stop.requested:
                laps = Laps()
                is_last = stop.requested or progress.steps + config.steps_per_iteration >= config.total_steps
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
        if not stop.requested:
            collector.close()
            policy, seed = greedy_policy(learner.module, learner.weights()), config.eval_seed()
            evaluation = evaluate(env, policy, config.eval_episodes, seed=seed, inference=config.inference)
            logger.log_evaluation(progress.steps, evaluation.return_mean)
    if stop.requested:  # once everything is closed in order
        raise KeyboardInterrupt(f"stopped after {progress.steps:,} steps; {how_to_go_on}")
    result = TrainResult(run_dir, progress.steps, time.monotonic() - began_s, evaluation.return_mean)
    save_result(run_dir, config, asdict(result), evaluation.returns.tolist())
    return result


def _begin(
    config: TrainConfig, env: RayVecEnv, learner: Learner, progress: Progress, state: dict[str, Any] | None
) -> Collector:
    """Returns what collects for the learner; both are new, or both where `state` left them."""
    has_published = state is not None and state["collector"].get("version", 0) > 0
    policy = Policy(learner.module, random_start=config.random_steps > 0 and not has_published)
    if state:
        restore(learner, state["learner"])
        if has_published:
            policy.load_weights(learner.weights())
    in_workers = config.inference == "worker"
    collector = Collector(
        env,
        policy,
        inference=config.inference,
        seed=config.seed,
        prefetch=in_workers and config.prefetch,
        by_reference=in_workers and not config.learns_in_driver,
    )
    if state:
        restore(collector, state["collector"])
    collector.reset(seed=config.train_seed(progress.steps))
    return collector


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


@contextlib.contextmanager
def ended_by_interrupt(env: RayVecEnv) -> Iterator[None]:
    """Lets a Ctrl-C that passes end the workers at once, whatever they are at."""
    try:
        yield
    except KeyboardInterrupt:
        env.close(terminate=True)
        raise


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch compute with `count` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class StopOnInterrupt:
    """Turns the first Ctrl-C into a request to stop; the second is a KeyboardInterrupt again.

    Signals belong to the main thread: in another one, nothing changes.

    Attributes:
        requested: Whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopOnInterrupt:
        if self._in_main_thread:
            self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def _request(self, signum: int, frame: types.FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)
        print("\nfinishing the iteration under way; Ctrl-C again stops at once", file=sys.stderr)

    def __exit__(self, *exc_info: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._previous)
