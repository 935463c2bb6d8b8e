"""The callbacks that every run has: checkpoints, evaluations, progress, metrics and the learning curve."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from rayvec.config import TrainConfig
from rayvec.data.batch import metric_means
from rayvec.errors import ConfigError
from rayvec.training import checkpoint
from rayvec.training.atomic_files import written_whole
from rayvec.training.callbacks import BestModel, RunContext
from rayvec.training.environments import eval_settings, make_eval_env
from rayvec.training.evaluation import eval_metrics, evaluate
from rayvec.training.plots import draw_learning_curve
from rayvec.training.run_dir import read_metrics
from rayvec.training.runs import network_of
from rayvec.vector.ray_vec_env import RayVecEnv

__all__ = [
    *("COUNTERS", "GAUGES", "Checkpointer", "Evaluator", "LearningCurve", "MetricsFile", "RayMetrics", "ShowProgress"),
    *("TensorBoard", "WeightsAndBiases", "default_callbacks"),
]

_LINE_INTERVAL_S = 5.0
"""How often a line of progress is printed."""

COUNTERS = {
    "rayvec_steps_total": ("Environment steps taken.", ()),
    "rayvec_episodes_total": ("Episodes ended.", ()),
    "rayvec_iterations_total": ("Iterations: rounds of collecting and learning.", ()),
    "rayvec_time_seconds_total": ("Wall time by activity.", ("activity",)),
    "rayvec_restarts_total": ("Restarts of environments, workers and nodes.", ("kind",)),
    "rayvec_ranks_cut_total": ("Decentralized ranks that were stopped early.", ()),
}
"""What each counter counts, from the start of the process, and its labels besides ``run``. Ray adds ``ray_``."""

GAUGES = {
    "rayvec_return_mean": "Mean return of the last 100 episodes.",
    "rayvec_staleness_updates": "Updates published after the oldest weights that acted.",
}
"""What each gauge measures."""


def default_callbacks(config: TrainConfig) -> list[Any]:
    """Returns the callbacks of a run with these settings, in their order; callbacks of a user follow them."""
    tracker = [] if config.track is None else [WeightsAndBiases()]
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
            iteration.evaluation = evaluate(eval_settings(config), self._env, self._module, weights, seed=seed)
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
    """Prints steps, steps/s, returns and where the time goes on standard error, every few seconds and at the end."""

    def on_start(self, context: RunContext) -> None:
        """Says that the first iteration begins."""
        config, steps = context.config, context.progress.steps
        self._total, self._printed_s = config.num_iterations * config.steps_per_iteration, -math.inf
        if steps < config.total_steps:
            self._show(steps, f"taking the {'next' if steps else 'first'} {config.steps_per_iteration:,} steps")

    def on_iteration(self, context: RunContext) -> None:
        """Shows the latest iteration."""
        try:
            self._show(context.progress.steps, progress_text(context))
        except BrokenPipeError:  # the rest of the run would print there, too
            context.stop("standard error is a pipe without a reader")

    def _show(self, steps: int, text: str) -> None:
        if steps >= self._total or time.monotonic() - self._printed_s >= _LINE_INTERVAL_S:
            self._printed_s = time.monotonic()
            line = f"{steps:,}/{self._total:,} steps · {text}"
            if sys.stderr.isatty():
                line = textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  ")
            print(line, file=sys.stderr, flush=True)


def progress_text(context: RunContext) -> str:
    """Returns steps/s, recent return, greedy evaluation and shares of wall time, in one line."""
    progress, metrics = context.progress, context.metrics
    returned = "none yet" if metrics["return_mean"] is None else f"{metrics['return_mean']:.2f}"
    parts = [f"{metrics['steps_per_s']:,.0f} steps/s", f"return {returned}"]
    parts += [f"{name} {mean:.2f}" for name, mean in metric_means(progress.recent_metrics).items()]
    if progress.eval_return is not None:
        parts.append(f"greedy {progress.eval_return:.2f}, best {progress.best_return:.2f}")
    activities = {name[7:]: s for name, s in metrics.items() if name.startswith("time_s/") and name.count("/") == 1}
    whole_s = sum(activities.values())
    shares = {name: seconds / whole_s for name, seconds in activities.items()}
    parts.append(", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01))
    return " · ".join(parts)


class LearningCurve:
    """Draws ``learning_curve.png`` when the run ends, also by an error."""

    def on_close(self, context: RunContext) -> None:
        """Draws the picture."""
        if context.run_dir.is_dir():
            draw_learning_curve(context.run_dir)


class MetricsFile:
    """Writes ``metrics.jsonl``: lines of JSON, each an object with ``steps`` and the metrics since the line before.

    Lines of steps after the checkpoint from which a run starts again are dropped: the run writes them again. Damaged
    lines are dropped, too; the last one is damaged if the computer lost power.
    """

    def on_start(self, context: RunContext) -> None:
        """Drops lines that the run will write again."""
        path = context.run_dir / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["steps"] <= context.progress.steps]
        with written_whole(path) as file:
            file.write("".join(map(_json_line, kept)).encode())

    def on_log(self, context: RunContext) -> None:
        """Appends a line; NaN and infinity become null."""
        with (context.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(_json_line(context.metrics))


def _json_line(metrics: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


class TensorBoard:
    """Writes the numbers of ``metrics.jsonl`` for TensorBoard, and the evaluation after training."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, context: RunContext) -> None:
        """Begins a file; points of later steps are hidden, since the run writes them again."""
        self.on_close(context)
        self._writer = SummaryWriter(os.fspath(context.run_dir), purge_step=context.progress.steps + 1)

    def on_log(self, context: RunContext) -> None:
        """Writes the metrics of a line."""
        names = [name for name in context.metrics if name != "steps" and not name.startswith("eval/")]
        self._write({name: context.metrics[name] for name in names}, context)

    def on_evaluation(self, context: RunContext) -> None:
        """Writes the metrics of an evaluation."""
        if context.evaluation is not None:
            self._write(eval_metrics(context.evaluation), context)

    def on_close(self, context: RunContext) -> None:
        """Writes what was logged after the last line, and closes the file."""
        if self._writer is not None:
            self._write(context.logged, context)
            self._writer.close()
            self._writer = None

    def _write(self, values: Mapping[str, float | None], context: RunContext) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, context.progress.steps)


class WeightsAndBiases:
    """Lets Weights & Biases copy what TensorBoard gets; it stands before `TensorBoard` in the list of callbacks.

    A run of it that is open already is used, and stays open. Otherwise a run begins in the project ``WANDB_PROJECT``,
    or else "rayvec", with its files beside the run's directory. A resumed run continues in the same one.

    Raises:
        ConfigError: The package is not installed.
    """

    def __init__(self) -> None:
        self._run: Any = None
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"track='wandb' needs the package wandb: {error}. Install it: pip install wandb. Or leave track out."
            ) from error

    def on_start(self, context: RunContext) -> None:
        """Begins or continues a run of Weights & Biases."""
        if self._run is None and self._wandb.run is not None:
            with contextlib.suppress(ValueError):  # it copies already
                self._wandb.tensorboard.patch()
        elif self._run is None:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "rayvec"),
                name=context.run_dir.name,
                id=context.progress.tracker_run,
                resume="allow",
                dir=os.fspath(context.run_dir.parent),
                config=context.config.to_plain(),
                sync_tensorboard=True,
            )
        if self._run is not None:
            context.progress.tracker_run = self._run.id

    def on_close(self, context: RunContext) -> None:
        """Ends the run that was begun; TensorBoard must be closed before."""
        if self._run is not None:
            self._run.finish(exit_code=int(context.error is not None))


class RayMetrics:
    """Counts what iterations did, in the metrics of Ray. Where Ray is not initialised it does nothing.

    Each metric has the label ``run``, the name of the run's directory. Every run has this callback already.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}

    def on_iteration(self, context: RunContext) -> None:
        """Adds the latest iteration."""
        ray, iteration = sys.modules.get("ray"), context.iteration
        if ray is None or not ray.is_initialized() or iteration is None:
            return
        stats, run = iteration.stats, {"run": context.run_dir.name}
        restarts = {"environment": stats.n_restarts, **stats.n_replaced}
        counted: list[tuple[str, float, dict[str, str]]] = [
            ("steps", stats.n_collected_steps, run),
            ("episodes", stats.n_collected_episodes, run),
            ("iterations", 1, run),
            ("ranks_cut", iteration.num_cut, run),
            *(("time_seconds", s, {**run, "activity": name}) for name, s in iteration.all_times_s.items()),
            *(("restarts", number, {**run, "kind": kind}) for kind, number in restarts.items()),
        ]
        self._metrics = self._metrics or _declared()
        for name, amount, labels in counted:
            if amount > 0:  # Ray refuses to add 0
                self._metrics[f"rayvec_{name}_total"].inc(amount, labels)
        self._metrics["rayvec_staleness_updates"].set(stats.staleness, run)
        if (return_mean := context.metrics.get("return_mean")) is not None:
            self._metrics["rayvec_return_mean"].set(return_mean, run)


def _declared() -> dict[str, Any]:
    from ray.util.metrics import Counter, Gauge

    counters = {name: Counter(name, text, ("run", *labels)) for name, (text, labels) in COUNTERS.items()}
    return {**counters, **{name: Gauge(name, text, ("run",)) for name, text in GAUGES.items()}}
