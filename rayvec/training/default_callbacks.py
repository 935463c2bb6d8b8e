"""The callbacks that every run has: checkpoints, evaluations, progress, metrics, trackers and the learning curve."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn
from rich.table import Column

from rayvec.config import TrainConfig
from rayvec.training import checkpoint
from rayvec.training.callbacks import BestModel, RunContext
from rayvec.training.evaluation import evaluate, saying_where
from rayvec.training.loggers import MetricsFile, RayMetrics, TensorBoard, WeightsAndBiases
from rayvec.training.plots import draw_learning_curve
from rayvec.training.runs import make_eval_env, network_of
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Checkpointer", "Evaluator", "LearningCurve", "ShowProgress", "default_callbacks"]

_LINE_INTERVAL_S = 5.0
"""How often a line is printed where there is no terminal to draw a bar on."""
_BESIDE = 15
"""Columns of the bar and the remaining time at least, with what divides them."""


def default_callbacks(config: TrainConfig) -> list[Any]:
    """Returns the callbacks of a run with these settings, in their order; callbacks of a user follow them."""
    tracker = [] if config.track is None else [WeightsAndBiases(config)]
    evaluations = [] if config.eval_interval_steps is None else [Evaluator(), BestModel()]
    logs = [MetricsFile(), TensorBoard(), RayMetrics()]
    return [*tracker, Checkpointer(), *evaluations, ShowProgress(), *logs, LearningCurve()]


class Checkpointer:
    """Writes ``checkpoint.pt``: after `checkpoint_interval_s` of training, with each evaluation, and at the end."""

    def on_start(self, context: RunContext) -> None:
        """Begins to count the seconds."""
        self._saved_s = time.monotonic()
        self.on_iteration(context)

    def on_iteration(self, context: RunContext) -> None:
        """Requests the checkpoint of the next iteration, if it is due."""
        if time.monotonic() - self._saved_s >= context.config.checkpoint_interval_s:
            context.request_checkpoint()

    def on_checkpoint(self, context: RunContext) -> None:
        """Replaces the file."""
        checkpoint.save(context.run_dir / "checkpoint.pt", context.state)
        self._saved_s = time.monotonic()


class Evaluator:
    """Plays episodes during training, every `eval_interval_steps`, on environments of its own on this machine.

    It does not affect training: the weights are those of a run without evaluations.
    """

    def __init__(self) -> None:
        self._env: RayVecEnv | None = None

    def on_start(self, context: RunContext) -> None:
        """Makes the environments."""
        if self._env is None:
            self._env = env = make_eval_env(context.config, is_final=False)
            with torch.random.fork_rng(devices=[]):  # an algorithm may draw its weights from the global generator
                self._module = network_of(context.config, env.single_observation_space, env.single_action_space)
        self._num_done = self._number(context, 0)
        self._request(context)

    def on_iteration(self, context: RunContext) -> None:
        """Plays the episodes, which are the same every time, if an evaluation is due and the run goes on."""
        iteration, config = context.iteration, context.config
        if self._is_due and self._env is not None and iteration is not None and iteration.state is not None:
            self._num_done, began_s = self._number(context, 0), time.monotonic()
            weights, seed = iteration.state["weights"].numpy(), config.eval_seed(is_final=False)
            with saying_where():
                iteration.evaluation = evaluate(config, self._env, self._module, weights, seed=seed)
            iteration.times_s["evaluate"] = time.monotonic() - began_s
            context.add_evaluation(iteration.evaluation, weights, iteration.times_s["evaluate"])
        self._request(context)

    def _request(self, context: RunContext) -> None:
        """Requests the state after the next iteration if it is to be evaluated; the last one is evaluated anyway."""
        more = context.config.steps_per_iteration
        is_last = context.progress.steps + more >= context.config.total_steps or context.stop_reason is not None
        self._is_due = not is_last and self._number(context, more) > self._num_done
        if self._is_due:
            context.request_checkpoint()

    def _number(self, context: RunContext, more: int) -> int:
        return (context.progress.steps + more) // (context.config.eval_interval_steps or sys.maxsize)

    def on_close(self, context: RunContext) -> None:
        """Closes the environments."""
        if self._env is not None:
            self._env.close(terminate=isinstance(context.error, KeyboardInterrupt))


class ShowProgress:
    """Shows steps, steps/s, returns and where the time goes, on standard error: a bar on a terminal, else lines.

    There is a line every few seconds, and one for the last step.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._line, self._printed_s = "", 0.0

    def on_start(self, context: RunContext) -> None:
        """Says that the first iteration begins."""
        self.on_close(context)
        config, steps, console = context.config, context.progress.steps, Console(stderr=True)
        self._total = config.num_iterations * config.steps_per_iteration
        if console.is_terminal:
            self._room = console.width - 2 * len(f"{self._total:,}") - _BESIDE
            self._bar = Bar(
                TextColumn("{task.completed:,}/{task.total:,}"),
                BarColumn(None, table_column=Column(ratio=1)),  # in the room that the others leave
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                TimeRemainingColumn(compact=True),
                console=console,
                expand=True,
            )
            self._bar.add_task("", total=self._total)
            self._bar.start()
        if steps < config.total_steps:
            self._show(steps, f"taking the {'next' if steps else 'first'} {config.steps_per_iteration:,} steps")

    def on_iteration(self, context: RunContext) -> None:
        """Shows the latest iteration."""
        self._show(context.progress.steps, progress_text(context))

    def _show(self, steps: int, text: str) -> None:
        if self._bar:
            fitting = textwrap.shorten(text, self._room, placeholder="")
            self._bar.update(self._bar.task_ids[0], completed=min(steps, self._total), description=fitting)
        else:
            self._line = f"{steps:,}/{self._total:,} steps · {text}"
            if steps >= self._total or time.monotonic() - self._printed_s >= _LINE_INTERVAL_S:
                self._printed_s = time.monotonic()
                self._print()

    def _print(self) -> None:
        if self._line:
            print(self._line, file=sys.stderr, flush=True)
        self._line = ""

    def on_close(self, context: RunContext) -> None:
        """Ends the bar, or prints the last line."""
        with contextlib.suppress(OSError):  # a terminal that was closed does not end the run
            if self._bar:
                self._bar.stop()
            self._print()


def progress_text(context: RunContext) -> str:
    """Returns steps/s, recent return, greedy evaluation and shares of wall time, in one line."""
    progress, metrics, split_s = context.progress, context.metrics, context.line.split_s
    returned = "none yet" if metrics["return_mean"] is None else f"{metrics['return_mean']:.2f}"
    parts = [f"{metrics['steps_per_s']:,.0f} steps/s", f"return {returned}"]
    parts += [f"{name} {mean:.2f}" for name, mean in progress.metric_means().items()]
    if progress.eval_return is not None:
        parts.append(f"greedy {progress.eval_return:.2f}, best {progress.best_return:.2f}")
    whole_s = sum(split_s.values())
    parts.append(", ".join(f"{name} {seconds / whole_s:.0%}" for name, seconds in split_s.items()))
    return " · ".join(parts)


class LearningCurve:
    """Draws ``learning_curve.png`` when the run ends, also by an error."""

    def on_close(self, context: RunContext) -> None:
        """Draws the picture, with the evaluation after training."""
        result = context.result
        has_evaluation = result is not None and result.eval_return_mean == result.eval_return_mean
        last = (result.total_steps, result.eval_return_mean) if result is not None and has_evaluation else None
        if context.run_dir.is_dir():
            draw_learning_curve(context.run_dir, context.config.title, last)
