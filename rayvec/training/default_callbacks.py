"""The callbacks that every run has: checkpoints, evaluations, progress, metrics, trackers and the learning curve."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import torch

from rayvec.config import TrainConfig
from rayvec.training.callbacks import BestModel, RunContext
from rayvec.training.evaluation import evaluate, saying_where
from rayvec.training.loggers import MetricsFile, TensorBoard
from rayvec.training.plots import draw_learning_curve
from rayvec.training.progress_display import ProgressDisplay, progress_text
from rayvec.training.ray_metrics import RayMetrics
from rayvec.training.run_dir import save_checkpoint
from rayvec.training.runs import make_eval_env, network_of
from rayvec.training.wandb_run import WeightsAndBiases
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = ["Checkpointer", "Evaluator", "LearningCurve", "ShowProgress", "default_callbacks"]


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
        save_checkpoint(context.run_dir, context.state)
        self._saved_s = time.monotonic()


class Evaluator:
    """Plays episodes during training, every `eval_interval_steps`, on environments of its own on this machine.

    It does not affect training: the weights are those of a run without evaluations.
    """

    def __init__(self) -> None:
        self._env: RayVecEnv | None = None
        self._num_done = 0
        self._is_due = False

    def on_start(self, context: RunContext) -> None:
        """Makes the environments."""
        config = context.config
        if self._env is None:
            self._env = make_eval_env(config, is_final=False)
            with torch.random.fork_rng(devices=[]):  # an algorithm may draw its weights from the global generator
                env = self._env
                self._module = network_of(config, env.single_observation_space, env.single_action_space)
        self._num_done = self._number(context, 0)
        self._request(context)

    def on_iteration(self, context: RunContext) -> None:
        """Plays the episodes, which are the same every time, if an evaluation is due and the run goes on."""
        iteration, config = context.iteration, context.config
        if self._is_due and self._env is not None and iteration is not None and iteration.state is not None:
            self._num_done, began_s = self._number(context, 0), time.monotonic()
            weights, seed = iteration.state["weights"].numpy(), config.eval_seed(is_final=False)
            with saying_where():
                evaluation = evaluate(config, self._env, self._module, weights, seed=seed)
            iteration.evaluation, iteration.times_s["evaluate"] = evaluation, time.monotonic() - began_s
            context.add_evaluation(evaluation, weights, iteration.times_s["evaluate"])
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
    """Shows steps, steps/s, returns and where the time goes, on standard error."""

    def __init__(self) -> None:
        self._display: ProgressDisplay | None = None

    def on_start(self, context: RunContext) -> None:
        """Says that the first iteration begins."""
        self.on_close(context)
        config, progress = context.config, context.progress
        self._display = ProgressDisplay(config.num_iterations * config.steps_per_iteration, progress.steps)
        if progress.steps < config.total_steps:
            which = "next" if progress.steps else "first"
            self._display.begin(f"taking the {which} {config.steps_per_iteration:,} steps")

    def on_iteration(self, context: RunContext) -> None:
        """Shows the latest iteration."""
        if self._display is not None:
            text = progress_text(context.progress, context.metrics, context.line.split_s)
            self._display.show(context.progress.steps, text)

    def on_close(self, context: RunContext) -> None:
        """Ends the bar, or prints the last line."""
        if self._display is not None:
            self._display.close()


class LearningCurve:
    """Draws ``learning_curve.png`` when the run ends, also by an error."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def on_end(self, context: RunContext) -> None:
        """Notes the evaluation after training."""
        if context.result is not None and not math.isnan(context.result.eval_return_mean):
            self._last = context.progress.steps, context.result.eval_return_mean

    def on_close(self, context: RunContext) -> None:
        """Draws the picture."""
        draw_learning_curve(context.run_dir, context.config.title, self._last)
