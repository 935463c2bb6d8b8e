"""A run gives its numbers to the metrics of Ray, and the dashboard of Grafana shows them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.training_kit import tiny

import rayvec
from rayvec.training.default_callbacks import COUNTERS, GAUGES
from rayvec.training.run_dir import read_metrics


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
