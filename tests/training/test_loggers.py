"""Metrics end up once each, in order, in every place that shows them: files, TensorBoard, W&B, Ray's metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
from helpers.training_kit import HERE, SMALL, lengthen, options, sac, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rayvec
from rayvec.errors import ConfigError
from rayvec.training.default_callbacks import COUNTERS, GAUGES
from rayvec.training.run_dir import load_run, read_metrics

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


def test_a_line_is_about_all_iterations_since_the_line_before(tmp_path: Path) -> None:
    """Lines of SAC are 1000 steps apart at least; of one iteration or two, they say the same of the same steps."""
    two, one = (
        lines_of(rayvec.train(sac(tmp_path / f"{num_steps}", num_steps=num_steps)).run_dir) for num_steps in (128, 256)
    )
    assert [line["steps"] for line in two] == [1024, 2048, 2560]
    for name in ("episodes", "return_sum"):
        assert [line[name] for line in two[:2]] == pytest.approx([line[name] for line in one[:2]])


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("hook", ["on_iteration", "on_log"])
def test_resuming_leaves_no_step_twice_and_none_out(tmp_path: Path, hook: str, is_first: bool) -> None:
    """A run that fails draws its learning curve, too."""

    def fail(context: rayvec.RunContext) -> None:
        if context.progress.steps == 192:
            raise RuntimeError

    settings = {**SHORT, "checkpoint_interval_s": 1e9}
    with pytest.raises(RuntimeError):
        mine = [SimpleNamespace(**{hook: fail})]
        rayvec.train(tiny(tmp_path / "a", **settings), callbacks=lambda rest: mine + rest if is_first else rest + mine)
    assert matplotlib.image.imread(tmp_path / "a" / "learning_curve.png").std() > 0.01
    assert [line["steps"] for line in lines_of(tmp_path / "a")] == [64, 128, 192]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"steps": 256, "retu')  # what a kill in the middle of a write leaves
    rayvec.resume(tmp_path / "a")
    assert [line["steps"] for line in lines_of(tmp_path / "a")] == [64, 128, 192, 256, 320]
    assert [event.step for event in scalars(tmp_path / "a")["return_mean"]] == [64, 128, 192, 256, 320]
    picture = matplotlib.image.imread(tmp_path / "a" / "learning_curve.png")
    assert picture.shape[1] >= 1000 and picture.std() > 0.01


COMMAND = [sys.executable, "-m", "rayvec", "train", "ppo"]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of this machine do not count."""
    for name in ("API_KEY", "PROJECT", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("CACHE_DIR", str(tmp_path / "cache"))):
        monkeypatch.setenv(f"WANDB_{name}", value)


def written(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_a_resumed_run_continues_in_the_same_run(tmp_path: Path) -> None:
    small = options({**SMALL, **HERE, "eval_episodes": 2, "total_steps": 128})
    subprocess.run([*COMMAND, *small, "--track=wandb", f"--run-dir={tmp_path / 'a'}"], check=True, cwd=tmp_path)
    lengthen(tmp_path / "a", 128, 192)
    subprocess.run([*COMMAND, f"--resume={tmp_path / 'a'}"], check=True, cwd=tmp_path)
    run_id = load_run(tmp_path / "a")[1]["progress"]["tracker_run"]
    files = written(tmp_path)
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    assert b"return_mean" in b"".join(path.read_bytes() for path in files)


BESIDE_A_RUN = """
import rayvec, wandb
from helpers.training_kit import tiny

mine = wandb.init(project="mine")
for name in ("a", "b"):
    rayvec.train(tiny(name, total_steps=64, eval_episodes=0, track="wandb"))
    assert wandb.run is mine
mine.log({"alive": 1})
mine.finish()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_a_run_that_is_open_is_used_and_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    subprocess.run([sys.executable, "-c", BESIDE_A_RUN], check=True, cwd=tmp_path)
    (path,) = written(tmp_path)
    assert b"return_mean" in path.read_bytes() and b"alive" in path.read_bytes()


@pytest.mark.usefixtures("offline")
def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        rayvec.train(tiny(tmp_path / "a", track="wandb"))
    assert not (tmp_path / "a").exists()


def test_metrics_are_those_of_the_iterations(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util import metrics

    sums: Counter[tuple[str, ...]] = Counter()
    last: dict[str, float] = {}

    class Counts(metrics.Counter):
        def inc(self, value: float = 1.0, tags: Any = None) -> None:
            labels = dict(tags)
            assert labels.pop("run") == "a"
            sums[self.info["name"], *labels.values()] += value
            super().inc(value, tags)

    class Gauges(metrics.Gauge):
        def set(self, value: float | None, tags: Any = None) -> None:
            assert value is not None
            last[self.info["name"]] = value
            super().set(value, tags)

    monkeypatch.setattr(metrics, "Counter", Counts)
    monkeypatch.setattr(metrics, "Gauge", Gauges)
    rayvec.train(tiny(tmp_path / "a", total_steps=256, num_nodes=1, workers_per_node=1, eval_episodes=0))
    lines = list(read_metrics(tmp_path / "a" / "metrics.jsonl"))
    assert sums["rayvec_steps_total",] == 256 and sums["rayvec_iterations_total",] == len(lines) == 4
    assert sums["rayvec_episodes_total",] == sum(line["episodes"] for line in lines)
    spent = sum(line["time_s/collect"] for line in lines)
    assert sums["rayvec_time_seconds_total", "collect"] == pytest.approx(spent)
    assert last == {"rayvec_return_mean": lines[-1]["return_mean"], "rayvec_staleness_updates": lines[-1]["staleness"]}


def test_the_dashboard_of_grafana_shows_metrics_that_exist() -> None:
    dashboard = json.loads(Path(rayvec.__file__).with_name("grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    shown = set()
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        (name,) = re.findall(r'\bray_(rayvec_\w+)\{run=~"\$run"', expression)
        assert ("rate(" in expression or "increase(" in expression) == (name in COUNTERS)
        labels = ("run", *(COUNTERS[name][1] if name in COUNTERS else ()))
        assert f"by ({', '.join(labels)}) (" in expression and expression.count("(") == expression.count(")")
        shown.add(name)
    assert shown == COUNTERS.keys() | GAUGES.keys()
