"""``rayvec bench scaling`` at its smallest, through the command line."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import AssertRefused
from helpers.processes import RAYVEC, assert_nothing_left, running

from rayvec.bench.harness.rayvec_adapters import TimedPolicy
from rayvec.bench.harness.time_split import STATES
from rayvec.bench.hosts import why_not
from rayvec.bench.results import SCHEMA_VERSION, Results, old_design
from rayvec.bench.scaling import _show, cells, chunk_length, expected_total_s
from rayvec.bench.settings import Scaling
from rayvec.bench.simulate import Nodes, check_memory
from rayvec.cli import main
from rayvec.config.schema import plain
from rayvec.errors import ConfigError

TINY = (
    "--nodes 1 --cores-per-node 2 --step-duration 0.002 --repeats 1 --window 0.1 --chunk-steps 8 --peer gymnasium-sync"
    " --learners driver decentralized"
).split()
ROW = {
    "nodes": int,
    "cores": int,
    "step_duration_s": float,
    "way": str,
    "transport": str,
    "steps_per_s": float,
    "ideal_steps_per_s": float,
    "efficiency": float,
    "of_bound": float,
    "bound_efficiency": float,
    "marked": bool,
    "split": dict,
    "simulated": bool,
}


def assert_schema(content: dict[str, Any]) -> None:
    assert content["schema"] == "rayvec-bench-scaling" and content["schema_version"] == SCHEMA_VERSION
    assert content["machine"]["cores"] >= 1 and content["versions"]["numpy"] and "bench scaling" in content["command"]
    for row in content["rows"]:
        for name, kind in ROW.items():
            assert isinstance(row[name], kind), name
        assert row["efficiency"] == pytest.approx(row["steps_per_s"] / (row["cores"] / row["step_duration_s"]))
        assert list(row["split"]) == list(STATES) and sum(row["split"].values()) == pytest.approx(1.0)
        assert row["steps_per_s"] > 0 and row["simulated"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_resumed_after_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with running(["bench", "scaling", *TINY, "--out", str(out)], tmp_path) as command:
        command.wait_until(lambda: (out / "scaling.json").exists() and '"way"' in (out / "scaling.json").read_text())
        assert command.interrupt() == 130
        assert "--resume" in command.stderr.read_text() and "Traceback" not in command.stderr.read_text()
        assert_nothing_left(command)
    before = json.loads((out / "scaling.json").read_text())["rows"]
    assert 1 <= len(before) < 5
    again = tmp_path / "again"
    again.mkdir()
    with running(["bench", "scaling", "--resume", str(out / "scaling.json")], again) as command:
        assert command.process.wait(400) == 0, command.stderr.read_text()
        printed = command.stdout.read_text()
        assert_nothing_left(command)
    content = json.loads((out / "scaling.json").read_text())
    assert_schema(content)
    assert content["rows"][: len(before)] == before and "--step-duration 0.002" in content["command"]
    ways = {row["way"]: row for row in content["rows"]}
    assert sorted(ways) == ["gymnasium-sync", "rayvec-decentralized", "rayvec-driver", "rayvec-worker", "upper-bound"]
    assert ways["rayvec-driver"]["transport"] == "tcp x 1"
    assert all(row["split"]["unattributed"] <= 0.05 for row in ways.values())
    assert ways["rayvec-worker"]["split"]["inference"] > 0
    assert ways["rayvec-worker"]["network_bytes_per_step"] > 30
    assert ways["rayvec-decentralized"]["network_bytes_per_step"] == 0  # of one rank
    assert "simulated nodes of 2 cores on this machine" in printed and "tcp x 1" in printed
    with (out / "scaling.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(content["rows"])
    for name in ("efficiency", "steps", "split"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_table_is_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayvec.bench.scaling.check_memory", lambda *_: pytest.fail("nothing is measured"))
    settings = Scaling(nodes=(1, 2), step_duration=(0.1,), peer=("gymnasium-async",))
    values = {**plain(settings), "out": str(tmp_path)}
    del values["resume"]
    rows = [
        {
            **{"nodes": count, "cores": 8 * count, "step_duration_s": step_s, "way": way, "transport": "tcp x 1"},
            **{"chunk_steps": 20 if way == "rayvec-worker" else None, "steps_per_s": 70.0 * count},
            **{"steps_per_s_per_core": 8.75, "ideal_steps_per_s": 80.0 * count, "efficiency": 0.875, "of_bound": 0.9},
            **{"of_bound_all": [0.9, 0.9], "marked": count == 2, "split": {"environment": 0.9, "unattributed": 0.1}},
        }
        for count, way, step_s in cells(settings)
    ]
    Results("scaling", values, tmp_path / "scaling.json", rows, ["a note"]).write()
    assert main(["bench", "scaling", "--resume", str(tmp_path / "scaling.json")]) == 0
    printed = capsys.readouterr().out
    for words in ("0 cells to measure, 8 done", "87.5%*", "rayvec-worker T=20", "0.900 (0.900 to 0.900)", "a note"):
        assert words in printed
    assert "More than 5% is unattributed: 1, 0.1, rayvec-driver" in printed and "can't emulate so many" in printed
    for name in ("efficiency", "steps", "split"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--peer warp-drive", ["warp-drive", "gymnasium-async", "benchmarks/peers.py"]),
        ("--peer rllib", ["rllib"]),
        ("--step-duration 0", ["step_duration", "above 0"]),
        ("--step-duration 1 -0.1", ["step_duration"]),
        ("--nodes 0", ["nodes", "at least 1"]),
        ("--nodes", ["--nodes", "at least one"]),
        ("--jitter normal:1", ["lognormal:SIGMA"]),
        ("--jitter lognormal:zero", ["lognormal:SIGMA"]),
        ("--nodes 100000 --cores-per-node 1000", ["GiB", "memory"]),
        ("--address 127.0.0.1:1", ["127.0.0.1:1", "ray start --head"]),
        ("--hosts --address 127.0.0.1:1", ["--hosts and --address", "one of the two"]),
        ("--learners", ["--learners", "at least one"]),
        ("--resume nowhere.json", ["nowhere.json", "rayvec-bench-scaling"]),
        ("--resume nowhere.json --nodes 3", ["--resume FILE alone", "--nodes"]),
    ],
)
def test_what_cannot_work(arguments: str, words: list[str], assert_refused: AssertRefused) -> None:
    assert_refused(["bench", "scaling", *arguments.split()], *words)


@pytest.mark.parametrize("command", ["scaling", "model"])
def test_hosts_need_root(command: str, assert_refused: AssertRefused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    why_not.cache_clear()
    try:
        assert_refused(["bench", command, "--hosts"], "Got: needs root", "leave --hosts out")
    finally:
        why_not.cache_clear()


def test_hosts_are_shown_beside_simulated_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Scaling(nodes=(2,), step_duration=(0.1,), hosts=True, peer=())
    ways = [way for _, way, _ in cells(settings)]
    assert ways == ["rayvec-driver", "rayvec-worker", "rayvec-decentralized", "upper-bound"]
    rows = [
        {
            **{"nodes": 2, "cores": 16, "step_duration_s": 0.1, "way": way, "place": place, "transport": "tcp x 2"},
            **{"chunk_steps": None, "steps_per_s": 16 / (0.1 + late_s), "steps_per_s_per_core": 8.0, "marked": False},
            **{"ideal_steps_per_s": 160.0, "efficiency": 0.9, "of_bound": 0.9, "of_bound_all": [0.9 - late_s]},
            "split": {"environment": 1.0},
        }
        for place, late_s in (("simulated", 0.002), ("hosts", 0.003))
        for way in ways
    ]
    results = Results("scaling", plain(settings), tmp_path / "scaling.json", rows)
    _show(settings, results)
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if "rayvec-worker " in line and "0.897" in line and "0.898" in line]
    for words in ("0.898 (0.898 to 0.898)", "0.897 (0.897 to 0.897)", " 2.000 ", " 3.000 "):
        assert words in line
    assert printed.count("rayvec-driver, hosts") == 2


@pytest.mark.slow
def test_on_a_cluster_its_nodes_are_used(tmp_path: Path, ray_cluster: Any) -> None:
    settings = "--nodes 1 --cores-per-node 2 --step-duration 0.002 --repeats 1 --window 0.05 --inference driver".split()
    command = [*RAYVEC, "bench", "scaling", *settings, "--peer", "gymnasium-sync", "--address", ray_cluster.address]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert f"the cluster at {ray_cluster.address}" in done.stdout and "simulated" not in done.stdout
    rows = {row["way"]: row for row in json.loads((tmp_path / "scaling.json").read_text())["rows"]}
    assert list(rows) == ["rayvec-driver", "gymnasium-sync", "upper-bound"]
    assert not any(row["simulated"] for row in rows.values()) and rows["upper-bound"]["efficiency"] > 0
    assert "driver's machine alone" in rows["gymnasium-sync"]["transport"]


def test_files_of_another_schema_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rayvec"])
    path = tmp_path / "results.json"
    Results("scaling", {"nodes": [1]}, path, [{"nodes": 1}]).write()
    assert Results.read(path, "scaling").rows == [{"nodes": 1}]
    with pytest.raises(ConfigError, match=r"rayvec-bench-compare, version 2\. Got: rayvec-bench-scaling"):
        Results.read(path, "compare")
    path.write_text(path.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99'))
    with pytest.raises(ConfigError, match="version 99"):
        Results.read(path, "scaling")
    path.write_text('{"schema": "rayvec-bench-scaling", "schema_version": 1}')
    with pytest.raises(ConfigError, match="KeyError: 'settings'"):
        Results.read(path, "scaling")
    path.write_text("[]")
    with pytest.raises(ConfigError, match="TypeError"):
        Results.read(path, "scaling")


def test_settings_of_another_version_are_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling.json"
    Results("scaling", {"warp": 9}, path).write()
    assert main(["bench", "scaling", "--resume", str(path)]) == 2
    assert "'warp'" in capsys.readouterr().err


def test_a_cluster_has_the_nodes_that_it_has() -> None:
    cluster = Nodes("host:6379", {}, cpus=[8.0, 8.0, 2.0])
    cluster.check(2, 8)
    cluster.check(3, 2)
    with pytest.raises(ConfigError, match=r"3 nodes of at least 8 cores\. Got: 2 at host:6379"):
        cluster.check(3, 8)


def test_the_upper_bound_beside_a_peer_needs_memory_too() -> None:
    room = psutil.virtual_memory().available / 2**20
    check_memory(0, ("rayvec",), int(room / 20))
    with pytest.raises(ConfigError, match="GiB"):
        check_memory(0, ("rayvec", "upper-bound"), int(room / 20))
    with pytest.raises(ConfigError, match="leave peers:tianshou_ray out"):
        check_memory(0, ("rayvec", "upper-bound", "peers:tianshou_ray"), int(room / 60))


def test_a_policy_alternates_between_its_actions() -> None:
    policy = TimedPolicy([np.array([0, 1, 0]), np.array([1, 1, 0])])
    taken = [policy.act(None, np.zeros((2, 0))) for _ in range(3)]
    assert [actions.tolist() for actions, _ in taken] == [[1, 1], [0, 1], [1, 1]]
    assert taken[0][1]["inference_s"].shape == (2,)


def test_a_result_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scaling.json").write_text("{}")
    assert main(["bench", "scaling", "--out", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err


def test_quick_leaves_out_what_takes_long() -> None:
    quick = Scaling(quick=True, peer=("gymnasium-async", "peers:tianshou_ray")).narrowed()
    assert quick.nodes == (1, 2) and quick.step_duration == (0.1, 0.01, 0.001) and quick.peer == ("gymnasium-async",)
    assert Scaling(quick=True, nodes=(4,)).narrowed().nodes == (4,)


def test_the_time_that_tables_are_expected_to_take() -> None:
    for settings, minutes in ((Scaling(), 25), (Scaling(quick=True).narrowed(), 3)):
        assert expected_total_s(settings, list(cells(settings))) < 60 * minutes


def test_chunks_are_of_at_least_one_step() -> None:
    settings, way = Scaling(), "rayvec-worker"
    assert chunk_length(settings, way, 100.0) == 1 and chunk_length(settings, way, 1e-6) == 128
    assert chunk_length(Scaling(chunk_steps=7), way, 0.1) == 7 and chunk_length(settings, "upper-bound", 0.1) == 1


def test_the_old_design_is_what_was_published() -> None:
    rows = old_design()
    assert len(rows) == 20
    assert rows[-4] | {"steps_per_s_per_core": 0.78} == rows[-4] and rows[-4]["nodes"] == 32
    assert all(abs(100 * r["steps_per_s"] / r["ideal_steps_per_s"] - r["efficiency_percent"]) < 0.7 for r in rows)
