"""Training: sampling, learning and weights go round."""

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

from rayvec.collector import Collector
from rayvec.config import TrainConfig
from rayvec.evaluate import evaluate
from rayvec.learners.base import Learner
from rayvec.loggers import RunLogger
from rayvec.policies import Policy
from rayvec.runs import create_run_dir, free_run_dir, load_run, make_env, make_learner, save_checkpoint, save_result
from rayvec.types import CollectStats
from rayvec.vector import RayVecEnv

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
        KeyboardInterrupt: Training was interrupted; the message says how to go on.
    """
    return _run(config, free_run_dir(config), None)


def resume(run_dir: Path | str) -> TrainResult:
    """Goes on with a run from its last checkpoint.

    Weights, optimizer, schedule, counters and random states are exactly those of the checkpoint. The
    environments begin new episodes, with seeds that depend on the steps taken up to the checkpoint.

    Raises:
        ConfigError: `run_dir` is not the directory of a run.
        CheckpointError: Its checkpoint is missing or damaged.
        KeyboardInterrupt: Training was interrupted; the message says how to go on.
    """
    config, state = load_run(Path(run_dir))
    return _run(config, Path(run_dir), state)


def _run(config: TrainConfig, run_dir: Path, state: dict[str, Any] | None) -> TrainResult:
    progress = Progress(**(state["progress"] if state else {}))
    began_s = time.monotonic() - progress.wall_s
    stop = StopOnInterrupt()
    with torch_threads(config.learner_threads), make_env(config) as env:
        learner, collector = _begin(config, env, state)
        collector.reset(seed=config.train_seed(progress.steps))
        if state is None:
            create_run_dir(run_dir, config)

        def save() -> float:
            progress.wall_s = time.monotonic() - began_s
            parts = {"learner": learner.state_dict(), "collector": collector.state_dict()}
            save_checkpoint(run_dir, {**parts, "progress": asdict(progress)})
            return time.monotonic()

        with RunLogger(run_dir, config, steps=progress.steps) as logger:
            with stop:
                saved_s = save()
                while progress.steps < config.total_steps and not stop.requested:
                    laps = Laps()
                    batch = collector.collect(n_step=config.steps_per_iteration)
                    laps.end("collect")
                    metrics = learner.update(batch)
                    laps.end("learn")
                    collector.set_weights(learner.weights())
                    laps.end("publish")

                    progress.add(batch.stats)
                    logger.log(progress.steps, batch.stats, metrics, laps.times_s)
                    if time.monotonic() - saved_s >= config.checkpoint_interval_s:
                        saved_s = save()
                save()
            if stop.requested:
                how_to_go_on = f"rayvec train {config.algorithm} --resume {run_dir}"
                raise KeyboardInterrupt(f"stopped after {progress.steps:,} steps; go on with: {how_to_go_on}")
            evaluation = evaluate(
                env, learner.module, config.eval_episodes, seed=config.eval_seed(), inference=config.inference
            )
            logger.log_evaluation(progress.steps, evaluation.return_mean)
    result = TrainResult(run_dir, progress.steps, time.monotonic() - began_s, evaluation.return_mean)
    save_result(run_dir, config, asdict(result), evaluation.returns.tolist())
    return result


def _begin(config: TrainConfig, env: RayVecEnv, state: dict[str, Any] | None) -> tuple[Learner, Collector]:
    """Returns what learns and what collects for it, both new or both where `state` left them."""
    learner = make_learner(config, env)
    if state:
        learner.load_state_dict(state["learner"])
    collector = Collector(env, Policy(learner.module), inference=config.inference, seed=config.seed)
    if state:
        collector.load_state_dict(state["collector"])
    return learner, collector


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        steps: Environment steps taken.
        episodes: Episodes ended.
        iterations: Rounds of sampling and learning.
        wall_s: Wall time up to the last checkpoint, in seconds.
    """

    steps: int = 0
    episodes: int = 0
    iterations: int = 0
    wall_s: float = 0.0

    def add(self, stats: CollectStats) -> None:
        """Counts an iteration."""
        self.steps += stats.n_collected_steps
        self.episodes += stats.n_collected_episodes
        self.iterations += 1


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


class _CallableModule(types.ModuleType):
    """``rayvec.train`` is a function and this module: importing the module must not hide the function."""

    def __call__(self, config: TrainConfig) -> TrainResult:
        return train(config)


sys.modules[__name__].__class__ = _CallableModule
