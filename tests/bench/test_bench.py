"""``rayvec bench`` at its smallest, through the command line, and what the learning benchmark computes."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import AssertRefused
from helpers.processes import assert_nothing_left, running

from rayvec.bench.model import COSTS, fit, predict
from rayvec.cli import main

TINY = "--cores-per-node 1 --step-duration 0.002 --repeats 1 --window 0.1 --chunk-steps 8".split()
WAYS = ["driver", "worker", "decentralized"]
COLUMNS = ["nodes", "cores", "step_duration_s", "steps_per_s", "steps_per_s_per_core", "ideal_steps_per_s"]


def rows_in(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_of_simulated_nodes_and_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "scaling.json"
    with running(["bench", "scaling", "--nodes", "1", "2", *TINY, "--way", *WAYS, "--out", "out"], tmp_path) as command:
        assert command.process.wait(400) == 0, command.stderr.read_text()
        printed = command.stdout.read_text()
        assert_nothing_left(command)
    rows = rows_in(path)
    assert [(row["nodes"], row["way"]) for row in rows] == [(nodes, way) for nodes in (1, 2) for way in WAYS]
    for row in rows:
        assert row["cores"] == row["nodes"] and row["ideal_steps_per_s"] == pytest.approx(row["cores"] / 0.002)
        assert row["efficiency"] == pytest.approx(row["steps_per_s"] / row["ideal_steps_per_s"])
        assert 0 < row["efficiency"] <= 1 and 0 < row["bound_efficiency"] <= 1
    assert "6 of 6, about 0 s left" in printed and "| worker T=8 " in printed
    with path.with_suffix(".csv").open() as file:
        assert [set(COLUMNS) <= set(row) for row in csv.DictReader(file)] == [True] * 6
    assert path.with_name("efficiency.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "model", str(path), "--nodes", "4", "--out", str(tmp_path)]) == 0
    assert [row["way"] for row in rows_in(tmp_path / "model.json")] == WAYS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_keeps_the_finished_rows(tmp_path: Path) -> None:
    with running(["bench", "scaling", "--nodes", "1", "2", *TINY, "--out", "out"], tmp_path) as command:
        command.wait_until(lambda: len(rows_in(tmp_path / "out" / "scaling.json")) == 2)
        assert command.interrupt() == 130
        assert "the finished rows are in" in command.stderr.read_text()
        assert "| driver " in command.stdout.read_text()
        assert_nothing_left(command)
    assert (tmp_path / "out" / "scaling.csv").exists()


@pytest.mark.slow
def test_a_cluster_and_an_environment_of_its_own(
    tmp_path: Path, ray_cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = "--nodes 2 --cores-per-node 1 --repeats 1 --window 0.1 --chunk-steps 8 --env-id".split()
    where = ["--address", ray_cluster.address, "--out", str(tmp_path)]
    assert main(["bench", "scaling", *tiny, "helpers.testing:CountingEnv", *where]) == 0
    assert f"Measured on the cluster at {ray_cluster.address}" in capsys.readouterr().out
    driver, worker = rows_in(tmp_path / "scaling.json")
    assert driver["step_duration_s"] == worker["step_duration_s"] and driver["steps_per_s"] > 0
    assert driver["bound_efficiency"] is None and not driver["is_overloaded"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("scaling --step-duration 0", ["step_duration", "greater than 0"]),
        ("scaling --nodes 0", ["nodes", "equal to 1"]),
        ("scaling --nodes", ["--nodes", "at least one value"]),
        ("scaling --nodes 100000 --cores-per-node 1000", ["GiB of memory"]),
        ("scaling --env-id NoSuch-v0", ["NoSuch-v0"]),
        ("scaling --out /proc/nowhere", ["/proc/nowhere", "--out"]),
        ("model nowhere.json", ["nowhere.json", "rayvec bench scaling"]),
        ("model --fit-nodes 0", ["fit_nodes", "equal to 1"]),
    ],
)
def test_what_cannot_work(arguments: str, words: list[str], assert_refused: AssertRefused) -> None:
    assert_refused(["bench", *arguments.split()], *words)


def test_an_address_where_nothing_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", "--address", "127.0.0.1:1", "--out", str(tmp_path / "runs")]) == 2
    assert not [*tmp_path.iterdir()]
    assert "127.0.0.1:1" in capsys.readouterr().err


def row(nodes: int, step_s: float, costs: dict[str, float]) -> dict[str, Any]:
    known = {"nodes": nodes, "cores": 4 * nodes, "way": "worker", "chunk_steps": 16, "step_duration_s": step_s}
    return known | {"steps_per_s": predict(costs, known)}


def test_costs_of_few_nodes_predict_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = dict(zip(COSTS, (0.002, 0.0005, 0.0, 0.0, 0.05), strict=True))
    rows = [row(nodes, step_s, costs) for nodes in (1, 2, 8) for step_s in (0.1, 0.01, 0.001)]
    found = fit(rows[:6])
    assert min(found.values()) >= 0
    assert [predict(found, each) for each in rows[6:]] == pytest.approx([each["steps_per_s"] for each in rows[6:]])
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps({"schema": "rayvec-bench-scaling", "rows": rows}))
    assert main(["bench", "model", str(path), "--nodes", "4", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("+0%") == 3
    errors = [each["error"] for each in rows_in(tmp_path / "model.json")]
    assert errors[:3] == [None] * 3 and errors[3:] == pytest.approx([0.0] * 3)
    assert predict(found, rows[0], latency_s=0.01) < rows[0]["steps_per_s"]


@pytest.mark.parametrize("content", ["[]", '{"schema": "other"}', '{"schema": "rayvec-bench-scaling", "rows": []}'])
def test_files_without_rows_to_fit(content: str, tmp_path: Path, assert_refused: AssertRefused) -> None:
    (tmp_path / "scaling.json").write_text(content)
    assert_refused(["bench", "model", "scaling.json", "--out", str(tmp_path)], "rayvec bench scaling")


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("learning")


def test_the_interquartile_mean_counts_parts_of_values(learning: Any) -> None:
    assert learning.interquartile_mean(np.array([9.0, 1, 2, 3, -50, 4, 80, 2])) == (2 + 2 + 3 + 4) / 4
    assert learning.interquartile_mean(np.array([5.0, 1, 2, 3, 4])) == pytest.approx((0.75 * 2 + 3 + 0.75 * 4) / 2.5)
    assert learning.interquartile_mean(np.array([7.0])) == 7
