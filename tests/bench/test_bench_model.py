"""The cost model: it finds costs that it was made with, and says what arithmetic says."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from rayvec.bench.cost_model.calibrate import check_settings, fit_settings, measure_settings, read_measured
from rayvec.bench.cost_model.checking import compare_overheads, explain
from rayvec.bench.cost_model.fitting import Observation, fit, fit_line
from rayvec.bench.cost_model.model import (
    Cluster,
    Costs,
    Fit,
    Setting,
    cpu_s,
    expected_maximum,
    predict_step_s,
    recommend,
    settings_for,
    stepping_s,
    steps_per_s,
)
from rayvec.bench.results import Results
from rayvec.bench.simulate import Nodes, nodes
from rayvec.bench.terminal import console, ticking
from rayvec.cli import main
from rayvec.errors import ConfigError

TRUTH = Fit(
    driver=Costs(1e-4, 3e-5, 4e-5, 1e-5, 2e-5, 5e-6, oversleep_s=7e-5, latency_s=5e-5, crowding=1.5, byte_s=1e-9),
    worker=Costs(2e-3, 5e-4, 8e-4, 1e-4, 2e-4, 3e-5, oversleep_s=7e-5, latency_s=1e-3, queueing=2.0, byte_s=1e-9),
    policy_call_s=1e-5,
    policy_row_s=1e-7,
)
CROWDED = replace(
    TRUTH,
    driver=replace(TRUTH.driver, driver_cold=1.0, node_cold=0.5, worker_cold=0.25),
    worker=replace(TRUTH.worker, driver_cold=0.5, worker_cold=0.4, driver_idle=0.01, node_idle=0.005),
    others=0.1,
    others_per_node=0.04,
)
SHARED = Cluster(shared_cores=2)


def observe(setting: Setting, truth: Fit = TRUTH) -> Observation:
    costs, step_s = truth.of(setting), predict_step_s(truth, setting, SHARED)
    driver_s, node_s, worker_s = cpu_s(costs, setting)
    return Observation(
        setting,
        step_s=step_s,
        work_s=setting.envs * (setting.step_s + costs.oversleep_s),
        driver_s=driver_s + costs.driver_idle * step_s,
        node_s=node_s + costs.node_idle * step_s,
        worker_s=worker_s + stepping_s(costs, setting),
        spread_s=costs.spread_s,
        others=truth.others + setting.nodes * truth.others_per_node,
    )


@pytest.mark.parametrize(
    ("setting", "cluster", "expected"),
    [
        # 1e-2 + oversleep; driver 1e-4; a wave of 2 frames, 2 nodes (4e-5 + 4e-5) and 8 workers (2e-5 + 5e-6), 2 cores.
        (Setting(2, 4), SHARED, 0.01007 + 1e-4 + 1.5 * (2 * (3e-5 + 8e-5) + 8 * 2.5e-5) / 2 + 8 * 34e-9 + 5e-5),
        # A tenth of a wave for each step of a chunk; a step's own 3e-5, which 4 workers need of 2 cores each 10.1 ms.
        (
            Setting(2, 2, inference="worker", chunk_steps=10),
            SHARED,
            0.01007 + 2e-4 + 3e-5 + (2 * (5e-5 + 1e-4) + 4 * 2e-5) / 2 + 4 * 34e-9 + 1e-4 + 2.0 * 3e-5 * 6e-5 / 0.0101,
        ),
        # On a cluster the nodes' own work counts once, and the network is passed twice.
        (Setting(2, 4), Cluster(None, 1e-3), 0.01007 + 1.6e-4 + 8e-5 + 2.5e-5 + 8 * 34e-9 + 5e-5 + 2e-3),
        # A chunk of ten steps: a tenth of each call.
        (
            Setting(1, 2, 3, "worker", 10),
            Cluster(),
            0.03021 + 2.5e-4 + 1e-4 + 2e-5 + 9e-5 + 1e-4 + 6 * 34e-9,
        ),
        # With a policy that acts on three rows in each worker.
        (
            Setting(1, 2, 3, "worker", 10, policy=True),
            Cluster(),
            0.03021 + 2.5e-4 + 1e-4 + 2e-5 + 9e-5 + 1e-4 + 6 * 34e-9 + 1.03e-5,
        ),
    ],
)
def test_a_step_by_hand(setting: Setting, cluster: Cluster, expected: float) -> None:
    assert predict_step_s(TRUTH, setting, cluster) == pytest.approx(expected, rel=1e-9)
    assert steps_per_s(TRUTH, setting, cluster) == pytest.approx(setting.num_envs / expected, rel=1e-9)


def test_nothing_is_quicker_than_its_cpu_time() -> None:
    uncrowded = replace(TRUTH, driver=replace(TRUTH.driver, crowding=0.0))
    busy = (1e-4 + 8 * (3e-5 + 4e-5 + 8 * 1e-5) + 64 * 2.5e-5) / 2
    assert predict_step_s(uncrowded, Setting(8, 8, step_s=1e-5), SHARED) == pytest.approx(busy)
    assert predict_step_s(uncrowded, Setting(8, 8, step_s=1e-5), Cluster()) < busy


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
    slow = replace(TRUTH, policy_call_s=5e-3, policy_row_s=0.0)
    one = Setting(1, 2, 4, policy=True)
    gain = predict_step_s(slow, one, SHARED) - predict_step_s(slow, replace(one, groups=2), SHARED)
    assert gain == pytest.approx(5e-3 + TRUTH.driver.call_s)
    gain = predict_step_s(slow, one, Cluster()) - predict_step_s(slow, replace(one, groups=2), Cluster())
    assert gain == pytest.approx(5e-3 + TRUTH.driver.call_s + TRUTH.driver.frame_s)
    slower = replace(slow, policy_call_s=0.1)
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


def test_settings_are_measured_on_nodes_of_a_cluster() -> None:
    driver = Setting(1, 2, step_s=0.001)
    settings = [driver, replace(driver, inference="worker", chunk_steps=8)]
    with nodes() as simulated:
        simulated.grow(1, 2)
        cluster = Nodes(simulated.address, simulated.environment, cpus=[0.0, 2.0])
        assert cluster.cores(1, 8) == 2 and simulated.cores(1, 8) == 8
        with ticking(len(settings), console()) as ticker:
            found = measure_settings(settings, cluster, 2, 0.05, ticker)
    assert {each.setting for each in found} == set(settings)
    for each in found:
        assert each.step_s > 0.001 and each.work_s > 0.001 and each.others >= 0.0
        assert min(each.driver_s, each.node_s, each.worker_s) > 0.0
        assert len(each.turns_s) == 3 and min(each.turns_s) == each.step_s


@pytest.mark.parametrize("truth", [TRUTH, CROWDED], ids=["quiet", "crowded"])
def test_costs_that_measurements_were_made_with_are_found_and_extrapolate(truth: Fit) -> None:
    found = fit([observe(setting, truth) for setting in fit_settings()], 2, (1e-5, 1e-7))
    assert (found.others, found.others_per_node) == pytest.approx((truth.others, truth.others_per_node), abs=1e-9)
    for name, cost in asdict(truth.driver).items():
        if name not in ("crowding", "queueing"):
            assert getattr(found.driver, name) == pytest.approx(cost, rel=5e-3, abs=1e-8), name
    for setting in [*fit_settings(), *check_settings(), Setting(32, 48), Setting(32, 48, inference="worker")]:
        for cluster in (SHARED, Cluster(None, 1e-4, 1e9)):
            expected = predict_step_s(truth, setting, cluster)
            assert predict_step_s(found, setting, cluster) == pytest.approx(expected, rel=1e-2)


def test_costs_are_found_on_a_cluster_too() -> None:
    def on_cluster(setting: Setting) -> Observation:
        return replace(observe(setting), step_s=predict_step_s(TRUTH, setting, Cluster()))

    found = fit([on_cluster(setting) for setting in fit_settings(most_workers=4)], None)
    assert found.others == 0.0 and found.driver.latency_s == pytest.approx(TRUTH.driver.latency_s, rel=1e-3)
    for setting in [*check_settings(), Setting(32, 48), Setting(32, 48, inference="worker")]:
        expected = predict_step_s(TRUTH, setting, Cluster())
        assert predict_step_s(found, setting, Cluster()) == pytest.approx(expected, rel=1e-2)


def test_others_on_the_cores_make_steps_slower() -> None:
    setting = Setting(4, 2)
    assert CROWDED.free_cores(4, 2) == pytest.approx(2 - 0.1 - 0.16)
    assert replace(CROWDED, others=9.0).free_cores(4, 2) == 1.0
    alone = replace(CROWDED, others=0.0, others_per_node=0.0)
    wave_s = TRUTH.driver.crowding * (
        (4 * 3e-5 * 2.0 + 4 * (4e-5 + 2 * 1e-5) * 1.5 + 8 * (2e-5 + 5e-6) * 1.25) * (1 / 1.74 - 1 / 2)
    )
    slower_s = predict_step_s(CROWDED, setting, SHARED) - predict_step_s(alone, setting, SHARED)
    assert slower_s == pytest.approx(wave_s)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"call_s": 2e-4, "frame_s": 6e-5}, "driver's CPU time"),
        ({"node_call_s": 8e-5, "node_worker_s": 2e-5}, "node's CPU time"),
        ({"worker_call_s": 4e-5, "env_s": 1e-5}, "worker's CPU time"),
        ({"latency_s": 5e-3}, "waiting"),
    ],
)
def test_what_is_wrong_in_the_model_is_named(wrong: dict[str, float], cause: str) -> None:
    model = replace(TRUTH, driver=replace(TRUTH.driver, **wrong))
    causes = explain(model, observe(Setting(4, 2)), SHARED)
    off_s = predict_step_s(TRUTH, Setting(4, 2), SHARED) - predict_step_s(model, Setting(4, 2), SHARED)
    assert sum(causes.values()) == pytest.approx(off_s) and causes[cause] == pytest.approx(off_s)


def test_other_work_on_the_machine_is_named() -> None:
    disturbed = observe(Setting(4, 2), replace(TRUTH, others=1.0))
    causes = explain(TRUTH, disturbed, SHARED)
    assert causes["others on the cores"] == pytest.approx(sum(causes.values())) and causes["others on the cores"] > 1e-4


def test_the_check_compares_with_two_nodes_and_ideal() -> None:
    settings = check_settings()
    measured = [observe(each) for each in [*dict.fromkeys(replace(s, nodes=2) for s in settings), *settings]]
    checks = compare_overheads(TRUTH, measured, SHARED)
    assert len(checks) == len(settings)
    assert all(abs(each["model_off"]) < 1e-9 and each["beats_both"] for each in checks)
    assert all(-1 < each["as_on_2_off"] < 0 for each in checks)
    wrong = compare_overheads(Fit(Costs(), Costs()), measured, SHARED)
    assert not any(each["beats_both"] for each in wrong)


def test_the_recommendation_is_the_best_of_all_settings() -> None:
    base = Setting(2, 1, step_s=0.001)
    best = recommend(TRUTH, base, 8, 4, SHARED)
    rates = {each: steps_per_s(TRUTH, each, SHARED) for each in settings_for(base, 8, 4)}
    assert best in rates and rates[best] > 0.98 * max(rates.values())
    assert all(each.num_envs == 8 and each.workers <= 4 for each in rates)
    assert {(each.inference, each.groups) for each in rates} == {("worker", 1), ("driver", 1), ("driver", 2)}


def test_a_fit_is_read_back_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    observations = [asdict(observe(setting)) for setting in fit_settings()]
    path = tmp_path / "model.json"
    extra = {"observations": observations, "shared_cores": 2, "policy_s": [1e-5, 1e-7]}
    Results("model", {}, path, extra=extra).write()
    measured = read_measured(path)
    assert [asdict(each) for each in measured.observations] == observations
    assert measured.fit().driver.frame_s == pytest.approx(TRUTH.driver.frame_s, rel=1e-3)
    out = tmp_path / "out"
    assert main(["bench", "model", "--fit", str(path), "--nodes", "2", "32", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in ("Assumptions:", "4,268 (0%)", "Recommended", "every worker has one of its own"):
        assert words in printed
    content = json.loads((out / "model.json").read_text())
    assert content["schema"] == "rayvec-bench-model" and len(content["rows"]) == 8 and len(content["notes"]) == 5
    row = content["rows"][-1]
    assert row["nodes"] == 32 and row["cores"] == 1536 and row["old_design_steps_per_s"] == 4267.77
    assert 0 < row["worker_efficiency"] < 1


def test_a_check_that_was_measured_is_held_against_the_model_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = check_settings()
    on_two = dict.fromkeys(replace(setting, nodes=2) for setting in checked)
    parts = {
        "observations": fit_settings(),
        "check_observations": [*on_two, *checked],
        "search_observations": list(settings_for(Setting(2, 1, step_s=0.001), 8, 4)),
    }
    extra: dict[str, object] = {name: [asdict(observe(each)) for each in part] for name, part in parts.items()}
    worse = extra["check_observations"][-1]  # type: ignore[index]
    worse["step_s"] += 0.1
    path = tmp_path / "model.json"
    Results("model", {}, path, extra=extra | {"shared_cores": 2, "policy_s": [0.0, 0.0]}).write()
    assert main(["bench", "model", "--fit", str(path), "--check", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "11 of 12 cells within 25%; 12 nearer" in printed and "measured less model is +" in printed
    *cells, search = json.loads((tmp_path / "out" / "model.json").read_text())["checks"]
    assert len(cells) == 12 and search["share"] > 0.98
    causes = cells[-1]["causes_s"]
    assert max(causes, key=lambda name: abs(causes[name])) == "waiting" and causes["waiting"] == pytest.approx(0.1, 0.1)


def test_a_file_without_measurements_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    Results("model", {}, path).write()
    with pytest.raises(ConfigError, match="policy_s"):
        read_measured(path)
    Results("model", {}, path, extra={"interrupted": True, "observations": [{}]}).write()
    with pytest.raises(ConfigError, match="interrupted after 1 settings"):
        read_measured(path)


def test_a_cluster_s_model_is_not_checked_on_simulated_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observations = [asdict(observe(setting)) for setting in fit_settings(most_workers=2)]
    path = tmp_path / "model.json"
    extra = {"observations": observations, "shared_cores": None, "policy_s": [0.0, 0.0]}
    Results("model", {}, path, extra=extra).write()
    assert main(["bench", "model", "--fit", str(path), "--check", "--out", str(tmp_path / "out")]) == 2
    assert "checked where it was fitted" in capsys.readouterr().err
