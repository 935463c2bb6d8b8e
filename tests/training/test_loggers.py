"""Metrics end up once each, in order, in every place that shows them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
from helpers.training_kit import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rayvec
from rayvec import PPOConfig
from rayvec.training.run_dir import read_metrics

SHORT = {"eval_episodes": 0, "total_steps": 320}


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run_dir / "metrics.jsonl"))


def scalars(run_dir: Path) -> dict[str, list[Any]]:
    events = EventAccumulator(str(run_dir)).Reload()
    return {name: events.Scalars(name) for name in events.Tags()["scalars"]}


def test_a_line_for_each_iteration_and_the_same_numbers_in_tensorboard(tmp_path: Path) -> None:
    run_dir = rayvec.train(tiny(tmp_path / "a", **SHORT)).run_dir
    lines = lines_of(run_dir)
    assert [line["steps"] for line in lines] == [64, 128, 192, 256, 320]
    for number, line in enumerate(lines, 1):
        ended = sum(each["episodes"] for each in lines[:number])
        assert line["return_mean"] == pytest.approx(sum(each["return_sum"] for each in lines[:number]) / ended)
        spent = sum(line[f"time_s/{name}"] for name in ("collect", "learn", "publish"))
        assert line["steps_per_s"] == pytest.approx(64 / spent) and 0 < line["time_s/collect/environment"] < spent
    shown = scalars(run_dir)
    assert set(shown) == set(lines[-1]) - {"steps"}
    for name, events in shown.items():
        assert [event.step for event in events] == [line["steps"] for line in lines]
        assert [event.value for event in events] == pytest.approx([line[name] for line in lines])


def test_a_line_is_about_all_iterations_since_the_line_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = lines_of(rayvec.train(tiny(tmp_path / "a", **SHORT)).run_dir)
    monkeypatch.setattr(PPOConfig, "log_interval_steps", 128)
    lines = lines_of(rayvec.train(tiny(tmp_path / "b", **SHORT)).run_dir)
    assert [line["steps"] for line in lines] == [128, 256, 320]
    for name in ("episodes", "return_sum"):
        first, second, third, fourth, fifth = (line[name] for line in every)
        assert [line[name] for line in lines] == pytest.approx([first + second, third + fourth, fifth])


def test_resuming_leaves_no_step_twice_and_none_out(tmp_path: Path) -> None:
    def fail(context: rayvec.RunContext) -> None:
        if context.progress.steps == 192:
            raise RuntimeError

    settings = {**SHORT, "checkpoint_interval_s": 1e9}
    with pytest.raises(RuntimeError):
        rayvec.train(tiny(tmp_path / "a", **settings), callbacks=[SimpleNamespace(on_log=fail)])
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"steps": 256, "retu')  # what a kill in the middle of a write leaves
    rayvec.resume(tmp_path / "a")
    assert [line["steps"] for line in lines_of(tmp_path / "a")] == [64, 128, 192, 256, 320]
    assert [event.step for event in scalars(tmp_path / "a")["return_mean"]] == [64, 128, 192, 256, 320]
    picture = matplotlib.image.imread(tmp_path / "a" / "learning_curve.png")
    assert picture.shape[1] >= 1000 and picture.std() > 0.01


def test_learning_curve_is_drawn_even_if_the_run_fails(tmp_path: Path) -> None:
    def fail(context: rayvec.RunContext) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        rayvec.train(tiny(tmp_path / "a"), callbacks=[SimpleNamespace(on_iteration=fail)])
    assert matplotlib.image.imread(tmp_path / "a" / "learning_curve.png").std() > 0.01
