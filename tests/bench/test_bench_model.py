"""The cost model: it says what arithmetic says, and predicts a richer machine than it knows within its limits."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import AssertRefused

from rayvec.bench.cost_model import command
from rayvec.bench.cost_model.command import compare_overheads
from rayvec.bench.cost_model.measuring import Measured, check_settings, fit_settings, measure_settings
from rayvec.bench.cost_model.model import (
    Cluster,
    Costs,
    Fit,
    Observation,
    Setting,
    all_reduce_s,
    expected_maximum,
    fit,
    fit_line,
    predict_step_s,
    recommend,
    settings_for,
    steps_per_s,
)
from rayvec.bench.results import Results
from rayvec.bench.simulate import Nodes, Place, nodes
from rayvec.cli import main
from rayvec.errors import ConfigError

DRIVER = Costs((1e-4, 3e-5, 0.0), (4e-5, 1e-5, 0.0), (2e-5, 5e-6), 7e-5, 5e-5, 0.75, 1e-9)
WORKER = Costs((2e-3, 5e-4, 0.0), (8e-4, 1e-4, 0.0), (2e-4, 3e-5), 7e-5, 1e-3, 0.5, 1e-9)
RANK = Costs((0.0, 0.0, 0.0), (8e-4, 5e-5, 0.0), (2e-4, 3e-5), 7e-5, 1e-3, 0.5, 1e-9)
TRUTH = Fit({"driver": {0.01: DRIVER}, "worker": {0.01: WORKER}, "rank": {0.01: RANK}}, policy_s=(1e-5, 1e-7))
ALONE_S = {0.001: 1.07e-3, 0.01: 1.01e-2}
NO_POLICY = replace(TRUTH, policy_s=(0.0, 0.0))
SHARED = Cluster(shared_cores=2)


def machine(setting: Setting, cluster: Cluster = SHARED) -> Observation:
    """A machine of two cores: what a setting takes there, with cold caches, other processes and idle threads."""
    costs = {"driver": DRIVER, "worker": WORKER, "rank": RANK}[setting.inference]
    cold = 1.0 + min(1.0, setting.meant_s / 0.01)  # calls take twice the CPU time after a sleep of 10 ms
    calls, workers = setting.calls, setting.nodes * setting.workers
    driver_s = cold * calls * (costs.driver[0] + setting.nodes * costs.driver[1])
    driver_s += 0.0 if setting.inference == "rank" else 0.01 * setting.meant_s
    node_s = cold * calls * (costs.node[0] + setting.workers * costs.node[1])
    worker_s = cold * (calls * costs.worker[0] + setting.envs * costs.worker[1])
    others = 0.1 + 0.04 * setting.nodes
    late_s = expected_maximum(workers) * 2e-5 * math.sqrt(setting.envs * calls)
    step_s = setting.envs * (1.004 * setting.step_s + 6e-5) + late_s + driver_s + node_s + worker_s
    step_s += calls * costs.latency_s + setting.num_bytes * costs.byte_s
    if cluster.shared_cores is not None:
        all_s, free = driver_s + setting.nodes * node_s + workers * worker_s, cluster.shared_cores - others
        step_s = max(all_s / free, step_s + costs.crowding * (all_s - driver_s - node_s - worker_s) / free)
    return Observation(setting, step_s, driver_s, node_s, worker_s, others, slowest_s=2 * step_s)


def measured_content(**parts: list[Setting]) -> dict[str, Any]:
    found: dict[str, Any] = {name: [asdict(machine(each)) for each in part] for name, part in parts.items()}
    return found | {"shared_cores": 2, "policy_s": [1e-5, 1e-7], "alone_s": ALONE_S}


@pytest.mark.parametrize(
    ("setting", "cluster", "expected"),
    [
        # 1e-2 + what a step takes longer; CPU time in line; three quarters of the rest over two cores; bytes; latency.
        (Setting(2, 4), SHARED, 0.01007 + 2.65e-4 + 0.75 * (8e-5 + 7 * 2.5e-5) / 2 + 8 * 34e-9 + 5e-5),
        # Chunks of ten steps: a tenth of each call, and a worker's own 3e-5 at each step.
        (
            Setting(2, 2, inference="worker", chunk_steps=10),
            SHARED,
            0.01007 + 3e-4 + 1e-4 + 5e-5 + 0.5 * (1e-4 + 3 * 5e-5) / 2 + 4 * 34e-9 + 1e-4,
        ),
        # On a cluster the nodes' own work counts once, and the network is passed twice.
        (Setting(2, 4), Cluster(None, 1e-3), 0.01007 + 2.65e-4 + 8 * 34e-9 + 5e-5 + 2e-3),
        (Setting(1, 2, 3, "worker", 10), Cluster(), 0.03021 + 2.5e-4 + 1e-4 + 2e-5 + 9e-5 + 1e-4 + 6 * 34e-9),
        # A rank has no driver.
        (Setting(1, 2, 3, "rank", 10), Cluster(), 0.03021 + 9e-5 + 2e-5 + 9e-5 + 1e-4 + 6 * 34e-9),
    ],
)
def test_a_step_by_hand(setting: Setting, cluster: Cluster, expected: float) -> None:
    assert predict_step_s(NO_POLICY, setting, cluster) == pytest.approx(expected, rel=1e-9)
    assert steps_per_s(NO_POLICY, setting, cluster) == pytest.approx(setting.num_envs / expected, rel=1e-9)
    rows = setting.num_envs if setting.inference == "driver" else setting.envs
    assert predict_step_s(TRUTH, setting, cluster) == pytest.approx(expected + 1e-5 + rows * 1e-7, rel=1e-9)


def test_no_step_is_faster_than_its_cpu_time() -> None:
    uncrowded = replace(NO_POLICY, costs={"driver": {0.01: replace(DRIVER, crowding=0.0)}})
    busy = (1e-4 + 8 * (3e-5 + 4e-5 + 8 * 1e-5) + 64 * 2.5e-5) / 2
    assert predict_step_s(uncrowded, Setting(8, 8, step_s=1e-5), SHARED) == pytest.approx(busy)
    assert predict_step_s(uncrowded, Setting(8, 8, step_s=1e-5), Cluster()) < busy


@pytest.mark.parametrize("ranks", [1, 2, 32])
def test_an_all_reduce_by_hand(ranks: int) -> None:
    network = Cluster(latency_s=1e-4, bytes_per_s=1e9)
    sent = 2 * (ranks - 1) / ranks * 6.8e6
    assert all_reduce_s(6.8e6, ranks, network) == pytest.approx(2 * (ranks - 1) * 1e-4 + sent / 1e9)


def test_costs_between_two_durations_are_interpolated() -> None:
    slow = replace(DRIVER, latency_s=DRIVER.latency_s + 1e-3)
    found = replace(TRUTH, costs={"driver": {0.001: DRIVER, 0.011: slow}})
    more = [
        predict_step_s(found, Setting(1, 1, step_s=step_s), SHARED)
        - predict_step_s(TRUTH, Setting(1, 1, step_s=step_s), SHARED)
        for step_s in (1e-4, 1e-3, 6e-3, 0.011, 1.0)
    ]
    assert more == pytest.approx([0.0, 0.0, 5e-4, 1e-3, 1e-3], abs=1e-12)


def test_bandwidth_is_paid_by_the_byte() -> None:
    setting = Setting(4, 8, obs_bytes=100_000)
    slow, fast = Cluster(bytes_per_s=1e9), Cluster()
    more = predict_step_s(TRUTH, setting, slow) - predict_step_s(TRUTH, setting, fast)
    assert more == pytest.approx(32 * 100_018 / 1e9)


def test_jitter_costs_less_in_chunks() -> None:
    even, uneven = Setting(4, 8), Setting(4, 8, sigma=0.5)
    late = predict_step_s(TRUTH, uneven, SHARED) - predict_step_s(TRUTH, even, SHARED)
    assert late == pytest.approx(expected_maximum(32) * 0.01 * math.sqrt(math.exp(0.25) - 1))
    in_chunks = [replace(each, inference="worker", chunk_steps=64) for each in (even, uneven)]
    assert predict_step_s(TRUTH, in_chunks[1], SHARED) - predict_step_s(TRUTH, in_chunks[0], SHARED) == pytest.approx(
        late / math.sqrt(64)
    )


def test_two_groups_hide_the_shorter_of_two() -> None:
    slow = replace(TRUTH, policy_s=(5e-3, 0.0))
    one = Setting(1, 2, 4)
    for cluster in (SHARED, Cluster()):
        gain = predict_step_s(slow, one, cluster) - predict_step_s(slow, replace(one, groups=2), cluster)
        assert gain == pytest.approx(5e-3 + 1.3e-4)
    slower = replace(slow, policy_s=(0.1, 0.0))
    assert predict_step_s(slower, replace(one, groups=2), SHARED) > predict_step_s(slower, one, SHARED)


@pytest.mark.parametrize("count", [2, 10, 100])
def test_the_expected_maximum_is_that_of_samples(count: int) -> None:
    samples = np.random.default_rng(0).standard_normal((20_000, count)).max(1).mean()
    assert expected_maximum(count) == pytest.approx(samples, abs=0.03)


def test_lines_have_no_negative_slope() -> None:
    x = [(1.0, n, n * n) for n in range(1, 8)]
    assert fit_line(x, [3 + 2 * n for _, n, _ in x]) == pytest.approx([3.0, 2.0, 0.0], abs=1e-9)
    first, second = ([1.0], [1.0]), [1.0, 3.0]
    assert fit_line(first, second, relative_to=[1e-3, 1.0]) == pytest.approx([1.0], rel=1e-5)
    falling = fit_line([(1.0, n) for n in range(1, 8)], [10.0 - n for n in range(1, 8)])
    assert falling[1] == 0.0 and falling[0] > 0


@pytest.mark.slow
def test_settings_are_measured_on_nodes_of_a_cluster() -> None:
    driver = Setting(1, 2, step_s=0.001)
    settings = [driver, *(replace(driver, inference=name, chunk_steps=8) for name in ("worker", "rank"))]
    with nodes() as simulated:
        simulated.grow(1, 2)
        cluster = Nodes(simulated.address, simulated.environment, cpus=[0.0, 2.0])
        assert cluster.cores(1, 8) == 2 and simulated.cores(1, 8) == 8
        found = measure_settings(settings, cluster, 2, 0.05)
    assert {each.setting for each in found} == set(settings)
    for each in found:
        assert each.slowest_s >= each.step_s > 0.001 and each.others >= 0.0
        assert min(each.node_s, each.worker_s) > 0.0
        assert (each.driver_s == 0.0) == (each.setting.inference == "rank")


@pytest.mark.parametrize("cluster", [SHARED, Cluster()], ids=["simulated nodes", "cluster"])
def test_more_nodes_are_predicted_within_the_limit(cluster: Cluster) -> None:
    found = fit([machine(setting, cluster) for setting in fit_settings()], cluster.shared_cores, (0.0, 0.0), ALONE_S)
    if cluster is SHARED:
        assert found.others == pytest.approx((0.1, 0.04), abs=1e-9)
        assert found.free_cores(4, 2) == pytest.approx(1.74)
        assert replace(found, others=(9.0, 0.0)).free_cores(4, 2) == 1.0
    for setting in check_settings():
        truth = machine(setting, cluster).overhead_s
        said = predict_step_s(found, setting, cluster) - setting.meant_s
        assert abs(said / truth - 1.0) < 0.1, setting
    large = Setting(32, 48), Setting(32, 48, inference="worker"), Setting(1, 48, inference="rank")
    for setting in (*large, Setting(8, 4, 4, step_s=0.001)):
        expected = machine(setting, Cluster()).step_s
        assert predict_step_s(found, setting, Cluster()) == pytest.approx(expected, rel=0.1), setting


def test_the_check_compares_with_two_nodes_and_ideal() -> None:
    settings = check_settings()
    measured = [machine(each) for each in [*dict.fromkeys(replace(s, nodes=2) for s in settings), *settings]]
    found = fit([machine(setting) for setting in fit_settings()], 2, (0.0, 0.0), ALONE_S)
    checks = compare_overheads(found, measured, SHARED)
    assert len(checks) == len(settings) and all(each["beats_both"] for each in checks)
    assert all(-1 < each["as_on_2_off"] < 0 for each in checks)
    nothing = Fit({"driver": {0.01: Costs()}, "worker": {0.01: Costs()}})
    assert not any(each["beats_both"] for each in compare_overheads(nothing, measured, SHARED))


def test_the_recommendation_is_near_the_best_of_all_settings() -> None:
    base = Setting(2, 1, step_s=0.001)
    found = fit([machine(setting) for setting in fit_settings()], 2, (0.0, 0.0), ALONE_S)
    best = recommend(found, base, 8, 4, SHARED)
    rates = {each: 1.0 / machine(each).step_s for each in settings_for(base, 8, 4) if each.groups == 1}
    assert best in rates and rates[best] > 0.9 * max(rates.values())
    tried = list(settings_for(base, 8, 4))
    assert all(each.num_envs == 8 and each.workers <= 4 for each in tried)
    assert {(each.inference, each.groups) for each in tried} == {("worker", 1), ("driver", 1), ("driver", 2)}


def test_a_fit_is_read_back_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    extra = measured_content(observations=fit_settings())
    Results("model", {}, path, extra=extra).write()
    assert [asdict(each) for each in Measured.read(path).observations] == extra["observations"]
    out = tmp_path / "out"
    assert main(["bench", "model", "--fit", str(path), "--nodes", "2", "32", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in ("Assumptions:", "4,268 (0%)", "Recommended", "every worker has one of its own"):
        assert words in printed
    content = json.loads((out / "model.json").read_text())
    assert content["schema"] == "rayvec-bench-model" and len(content["rows"]) == 8 and len(content["notes"]) == 6
    row = content["rows"][-1]
    assert row["nodes"] == 32 and row["cores"] == 1536 and row["old_design_steps_per_s"] == 4267.77
    assert 0 < row["worker_efficiency"] < row["decentralized_efficiency"] < row["alone_efficiency"] < 1
    assert row["alone_efficiency"] == pytest.approx(1.0 / 1.07) and row["all_reduce_s"] > 0


def test_a_check_that_was_measured_is_compared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked = check_settings()
    on_two = dict.fromkeys(replace(setting, nodes=2) for setting in checked)
    extra = measured_content(
        observations=fit_settings(),
        check_observations=[*on_two, *checked],
        search_observations=list(settings_for(Setting(2, 1, step_s=0.001), 8, 4)),
    )
    worse = extra["check_observations"][-1]
    worse["step_s"] += 0.1
    path = tmp_path / "model.json"
    Results("model", {}, path, extra=extra).write()
    assert main(["bench", "model", "--fit", str(path), "--check", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "11 of 12 cells within 25%" in printed
    *cells, search = json.loads((tmp_path / "out" / "model.json").read_text())["checks"]
    assert len(cells) == 12 and search["share"] > 0.9


def test_a_file_without_measurements_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    Results("model", {}, path).write()
    with pytest.raises(ConfigError, match="shared_cores"):
        Measured.read(path)
    Results("model", {}, path, extra={"interrupted": True, "observations": [{}]}).write()
    with pytest.raises(ConfigError, match="interrupted after 1 settings"):
        Measured.read(path)
    no_rank = [each for each in fit_settings() if each.inference != "rank"]
    Results("model", {}, path, extra=measured_content(observations=no_rank)).write()
    with pytest.raises(ConfigError, match="no decentralized rank was measured"):
        Measured.read(path)


def test_a_cluster_s_model_is_not_checked_on_simulated_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    extra = measured_content(observations=fit_settings(most_workers=2)) | {"shared_cores": None}
    Results("model", {}, path, extra=extra).write()
    assert main(["bench", "model", "--fit", str(path), "--check", "--out", str(tmp_path / "out")]) == 2
    assert "checked where it was fitted" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_simulated_nodes_is_checked_on_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file holds was measured on simulated nodes, so it is measured again."""
    places = []

    def made(address: str | None, place: Place) -> Any:
        places.append(place)
        return nullcontext(Nodes("", {}, place, add=lambda cores: None))

    def measured(todo: list[Setting], where: Nodes, cores: int, window: float, keep: Any) -> list[Observation]:
        found = [machine(setting) for setting in todo]
        keep(found)
        return found

    monkeypatch.setattr(command, "nodes", made)
    monkeypatch.setattr(command, "measure_settings", measured)
    monkeypatch.setattr(command, "check_hosts", lambda: None)
    checked = check_settings()
    on_two = dict.fromkeys(replace(setting, nodes=2) for setting in checked)
    path = tmp_path / "model.json"
    extra = measured_content(observations=fit_settings(), check_observations=[*on_two, *checked])
    Results("model", {}, path, extra=extra).write()
    options = ["bench", "model", "--check", "--hosts", "--out", str(tmp_path / "out")]
    assert main([*options, "--fit", str(path)]) == 0 and places == ["hosts"]
    printed = capsys.readouterr().out
    assert "checked on hosts in network namespaces" in printed and "12 of 12 cells within 25%" in printed
    assert Measured.read(tmp_path / "out" / "model.json").checked_on == "hosts"
    assert main(options) == 0 and places == ["hosts", "hosts"]  # fitted to hosts, too
    assert json.loads((tmp_path / "out" / "model.json").read_text())["shared_cores"] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--address 127.0.0.1:1", ["--hosts without --address", "--address 127.0.0.1:1"]),
        ("--fit model.json", ["--fit model.json without --check"]),
    ],
)
def test_where_hosts_can_not_be_measured(
    arguments: str, words: list[str], assert_refused: AssertRefused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "check_hosts", lambda: None)
    assert_refused(["bench", "model", "--hosts", *arguments.split()], *words)
