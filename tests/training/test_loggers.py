"""Metrics end up once each, in order, in every place that shows them."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
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
from rayvec.training.loggers import MetricsFile, RunLogger, read_metrics
from rayvec.training.plots import draw_learning_curve, smoothed
from rayvec.training.progress_display import ProgressDisplay
from rayvec.training.run_dir import load_result
from rayvec.training.run_state import Progress
from rayvec.training.runs import LEARNERS
from rayvec.training.trainer import Iteration

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
    progress = Progress(steps=resumed_at)
    with RunLogger(run_dir, config, progress) as logger:
        for step in steps:
            iteration = Iteration(stats(float(step), 0.0), {"loss": math.nan if step == 16 else 0.5}, TIMES_S)
            progress.add(iteration.stats)
            assert progress.steps == step
            logger.add(iteration)
            logger.end_line()


def test_a_line_for_each_iteration(tmp_path: Path) -> None:
    log(tmp_path, [16, 32])
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["steps"] == 16 and second["steps"] == 32
    assert second["return_mean"] == 12.0 and second["return_max"] == 32.0  # of all four episodes
    assert second["return_sum"] == 32.0 and second["episodes"] == 2
    assert second["steps_per_s"] == pytest.approx(16 / 0.4)
    assert second["time_s/learn"] == 0.1 and second["time_s/collect/environment"] == 0.2
    assert first["learner/loss"] is None and second["learner/loss"] == 0.5


def test_a_line_is_about_all_iterations_since_the_line_before(tmp_path: Path) -> None:
    log(tmp_path, [16, 32, 48, 64, 80], config=replace(CONFIG, log_interval_steps=32))
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [line["steps"] for line in lines] == [32, 64, 80]
    assert [line["episodes"] for line in lines] == [4, 4, 2] and lines[1]["return_sum"] == 48.0 + 64.0
    assert lines[0]["time_s/learn"] == pytest.approx(0.2) and lines[0]["steps_per_s"] == pytest.approx(32 / 0.8)
    assert [event.step for event in scalars(tmp_path)["return_mean"]] == [32, 64, 80]


def test_returns_are_of_the_last_hundred_episodes_and_never_missing_after_the_first(tmp_path: Path) -> None:
    progress = Progress()
    with RunLogger(tmp_path, CONFIG, progress) as logger:
        for returns in [(), (5.0,), (), tuple(range(150)), ()]:
            iteration = Iteration(stats(*returns), {}, TIMES_S)
            progress.add(iteration.stats)
            logger.add(iteration)
            logger.end_line()
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


def test_resuming_leaves_only_damaged_lines_out(tmp_path: Path) -> None:
    log(tmp_path, [16, 32, 48])
    first, _, third = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(first + b"\xff\n" + third + b'{"steps": "many"}\n')
    log(tmp_path, [64], resumed_at=48)
    assert [line["steps"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [16, 48, 64]


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


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", steps=0)
    file.write({"steps": 1, "nan": math.nan, "inf": math.inf, "none": None, "one": 1.0})
    file.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "steps": 1,
        "nan": None,
        "inf": None,
        "none": None,
        "one": 1,
    }


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
def test_a_run_whose_directory_is_gone_is_an_error(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    run_dir, progress = tmp_path / "run", Progress()
    run_dir.mkdir()
    with (
        pytest.raises(ConfigError, match=f"{run_dir}, is gone"),
        RunLogger(run_dir, CONFIG, progress) as logger,
    ):
        logger._tensorboard.flush()  # else its thread raises too
        shutil.rmtree(run_dir) if how == "removed" else run_dir.rename(tmp_path / "other")
        iteration = Iteration(stats(1.0), {}, TIMES_S)
        progress.add(iteration.stats)
        logger.add(iteration)
        logger.end_line()
    assert not caplog.records  # the error is enough


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
    draw_learning_curve(tmp_path, "title", (count, 1.0))
    assert matplotlib.image.imread(tmp_path / "learning_curve.png").std() > 0.01


def test_smoothing_keeps_a_constant_and_both_ends() -> None:
    values, weights = np.arange(101.0), np.ones(101)
    assert smoothed(np.full(101, 3.0), weights) == pytest.approx(3.0)
    assert smoothed(values, weights) == pytest.approx(values)
    heavy = smoothed(np.array([0.0, 1.0, 0.0]), np.array([1.0, 2.0, 1.0]))
    assert heavy == pytest.approx([0.0, 0.5, 0.0])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    file = _Terminal()
    display = ProgressDisplay(100, file=file)
    display.show(40, "1,000 steps/s · return 3.0")
    display.close()
    assert "40/100 steps" in file.getvalue() and "━" in file.getvalue() and "return 3.0" in file.getvalue()


def test_a_narrow_terminal_shows_all_steps_and_the_begin_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    file = _Terminal()
    display = ProgressDisplay(10_000_000, 2_592_000, file)
    assert "2,592,000/10,000,000 steps" in file.getvalue()  # of a run that is resumed
    display.show(2_593_000, "1,000 steps/s · return 3.0 · collect 45%, learn 50%, publish 5%")
    display.close()
    last = file.getvalue().rpartition("2,593,000/10,000,000 steps")[2]
    assert "1,000 steps/s" in last and "…" in last
