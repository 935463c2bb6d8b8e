"""Metrics end up once each, in order, in every place that shows them."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from helpers.training_kit import tiny
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import rayvec
from rayvec import PPOConfig
from rayvec.data import CollectStats
from rayvec.errors import ConfigError
from rayvec.learners.ppo import PPOLearner
from rayvec.training.callbacks import MetricsLine, RunContext, call
from rayvec.training.default_callbacks import MetricsFile, ShowProgress, TensorBoard
from rayvec.training.plots import draw_learning_curve
from rayvec.training.run_dir import load_result, read_metrics, save_config
from rayvec.training.runs import LEARNERS
from rayvec.training.trainer import Iteration, Progress

CONFIG = PPOConfig(num_envs=4, num_steps=4, minibatch_size=16, total_steps=64)
TIMES_S = {"collect": 0.3, "learn": 0.1}


def stats(*returns: float) -> CollectStats:
    return CollectStats(
        returns=np.array(returns),
        lens=np.full(len(returns), 3),
        n_collected_steps=16,
        n_collected_episodes=len(returns),
        n_surplus_steps=0,
        collect_time_s=0.3,
        steps_per_s=53.3,
        time_split_s={"environment": 0.2, "transport": 0.1, "waiting": 0.0},
        weights_versions=(1, 1),
    )


def log(run_dir: Path, steps: list[int], resumed_at: int = 0, config: PPOConfig = CONFIG) -> None:
    iterations = [
        Iteration(stats(float(step), 0.0), {"loss": math.nan if step == 16 else 0.5}, dict(TIMES_S)) for step in steps
    ]
    assert log_iterations(run_dir, iterations, resumed_at, config) == steps


def log_iterations(
    run_dir: Path, iterations: list[Iteration], resumed_at: int = 0, config: PPOConfig = CONFIG
) -> list[int]:
    """Calls the callbacks that write metrics as a run does; returns the steps after each iteration."""
    context, callbacks, steps = (
        RunContext(config, run_dir, Progress(steps=resumed_at)),
        [MetricsFile(), TensorBoard()],
        [],
    )
    call(callbacks, "on_start", context)
    for iteration in iterations:
        context.progress.add(iteration.stats)
        context.line.add(iteration)
        steps.append(context.progress.steps)
        if context.line.sums["steps"] >= config.log_interval_steps or iteration is iterations[-1]:
            context.metrics = context.line.metrics(context.progress)
            call(callbacks, "on_log", context)
            context.line = MetricsLine()
    call(callbacks, "on_close", context)
    return steps


def test_a_line_for_each_iteration(tmp_path: Path) -> None:
    log(tmp_path, [16, 32])
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["steps"] == 16 and second["steps"] == 32
    assert second["return_mean"] == 12.0 and second["return_max"] == 32.0  # of all four episodes
    assert second["return_sum"] == 32.0 and second["episodes"] == 2
    assert second["steps_per_s"] == pytest.approx(16 / 0.4)
    assert second["time_s/learn"] == 0.1 and second["time_s/collect/environment"] == 0.2
    assert first["learner/loss"] is None and second["learner/loss"] == 0.5


def test_a_line_is_about_all_iterations_since_the_line_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CONFIG), "log_interval_steps", 32)
    log(tmp_path, [16, 32, 48, 64, 80])
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [line["steps"] for line in lines] == [32, 64, 80]
    assert [line["episodes"] for line in lines] == [4, 4, 2] and lines[1]["return_sum"] == 48.0 + 64.0
    assert lines[0]["time_s/learn"] == pytest.approx(0.2) and lines[0]["steps_per_s"] == pytest.approx(32 / 0.8)
    assert [event.step for event in scalars(tmp_path)["return_mean"]] == [32, 64, 80]


def test_returns_are_of_the_last_hundred_episodes_and_never_missing_after_the_first(tmp_path: Path) -> None:
    many = [(), (5.0,), (), tuple(range(150)), ()]
    log_iterations(tmp_path, [Iteration(stats(*returns), {}, dict(TIMES_S)) for returns in many])
    means = [line["return_mean"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert means == [None, 5.0, 5.0, np.arange(50, 150).mean(), np.arange(50, 150).mean()]


def test_resuming_leaves_no_step_twice_and_none_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of one second are read in the order of this count, in which 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    log(tmp_path, [16, 32, 48])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"steps": 64, "retu')  # what a kill in the middle of a write leaves
    log(tmp_path, [48, 64], resumed_at=32)
    assert [line["steps"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [16, 32, 48, 64]
    assert [event.step for event in scalars(tmp_path)["return_mean"]] == [16, 32, 48, 64]


def scalars(run_dir: Path) -> dict[str, list]:
    events = EventAccumulator(str(run_dir)).Reload()
    return {name: events.Scalars(name) for name in events.Tags()["scalars"]}


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    log(tmp_path, [16, 32])
    shown = scalars(tmp_path)
    last = list(read_metrics(tmp_path / "metrics.jsonl"))[-1]
    assert set(shown) == set(last) - {"steps"}
    for name, events in shown.items():
        assert events[-1].step == 32 and events[-1].value == pytest.approx(last[name])


class _ReturnsArrays(PPOLearner):
    def update(self, batch: Any) -> Any:
        return {**super().update(batch), "numpy": np.float32(1.5), "whole": np.int64(3), "torch": torch.tensor(2.5)}


def test_a_learner_of_your_own_may_return_numbers_of_numpy_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEARNERS, PPOConfig, _ReturnsArrays)
    run_dir = rayvec.train(tiny(tmp_path / "a", total_steps=64)).run_dir
    *_, line = read_metrics(run_dir / "metrics.jsonl")
    assert [line[f"learner/{name}"] for name in ("numpy", "whole", "torch")] == [1.5, 3, 2.5]


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_run_whose_directory_is_gone_is_an_error(tmp_path: Path, how: str) -> None:
    def lose(context: rayvec.RunContext) -> None:
        shutil.rmtree(context.run_dir) if how == "removed" else context.run_dir.rename(tmp_path / "other")

    with pytest.raises(ConfigError, match=f"{tmp_path / 'a'}, is gone"):
        rayvec.train(tiny(tmp_path / "a", checkpoint_interval_s=1e9), callbacks=[SimpleNamespace(on_iteration=lose)])


def test_learning_curve_is_drawn_even_if_the_run_fails(tmp_path: Path) -> None:
    def fail(context: rayvec.RunContext) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        rayvec.train(tiny(tmp_path / "a"), callbacks=[SimpleNamespace(on_iteration=fail)])
    picture = matplotlib.image.imread(tmp_path / "a" / "learning_curve.png")
    assert picture.shape[1] >= 1000 and picture.std() > 0.01


def test_ctrl_c_while_the_curve_is_drawn_keeps_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=2))
    assert len(load_result(tmp_path / "a")["eval_returns"]) == 2


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_learning_curve_of_any_number_of_points(count: int, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"steps": i, "return_sum": float(i), "episodes": 1} for i in range(count)]
    lines.append({"steps": 9, "return_sum": 0.0, "episodes": 0, "eval/return_mean": 2.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_config(tmp_path, CONFIG)
    draw_learning_curve(tmp_path)
    assert matplotlib.image.imread(tmp_path / "learning_curve.png").std() > 0.01


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_all_steps_and_whole_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "70"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", file := _Terminal())
    context, display = RunContext(CONFIG, tmp_path, Progress(steps=16)), ShowProgress()
    display.on_start(context)
    context.line.add(Iteration(stats(3.0), {}, {"collect": 0.45, "learn": 0.5, "publish": 0.05}))
    context.progress.steps, context.metrics = (
        32,
        context.line.metrics(Progress(32, recent_returns=[3.0], recent_lens=[3])),
    )
    display.on_iteration(context)
    display.on_close(context)
    last = file.getvalue().rpartition("32/64")[2]
    assert "━" in last and "16 steps/s · return 3.00" in last and "…" not in last and "publish" not in last
