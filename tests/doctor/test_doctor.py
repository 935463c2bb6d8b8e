"""What `rayvec doctor` reads on a machine, and what it says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import running

from rayvec.bench.cost_model.default_fit import DEFAULT_FIT
from rayvec.bench.cost_model.model import Cluster, Setting, recommend
from rayvec.cli import main
from rayvec.doctor.cluster import recommended
from rayvec.doctor.findings import Finding, Node, of_network, of_node, of_versions
from rayvec.doctor.probe import read_facts

GIB = 1 << 30


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Those of this machine, without limits."""
    return {
        **read_facts(),
        **{"cores": 8, "machine_cores": 8, "quota_cores": None, "niceness": 0, "files_soft": 1024, "files_hard": 65536},
        **{"shm_free": GIB, "shm_total": GIB, "memory_free": 8 * GIB, "memory_limit": None, "gpus": 0},
    }


def node(**resources: float) -> Node:
    return Node("a" * 56, "10.0.0.2", "10.0.0.2", {"CPU": 8, "object_store_memory": GIB / 2, **resources}, False)


def worst(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(each.level, each.check) for each in findings if each.level != "ok"]


def test_a_machine_in_order(facts: dict[str, Any]) -> None:
    findings = [*of_versions(facts, facts, "10.0.0.2"), *of_node(facts, "10.0.0.2", node()), *of_node(facts, "driver")]
    assert worst(findings) == []
    assert {each.check for each in findings} >= {"versions", "cores", "niceness", "open files", "/dev/shm", "memory"}


@pytest.mark.parametrize(
    ("changes", "resources", "level", "check", "words"),
    [
        ({"quota_cores": 1.5}, {}, "warning", "cores", ["8 in Ray", "quota of 1.5", "--num-cpus=1"]),
        ({"cores": 4}, {}, "warning", "cores", ["4 of 8", "--num-cpus=4"]),
        ({"niceness": 15}, {}, "warning", "niceness", ["nice 15", "RAY_worker_niceness=0"]),
        ({"files_hard": 100}, {}, "error", "open files", ["need 104", "ulimit -n"]),
        ({"files_hard": 1024}, {}, "warning", "open files", ["ulimit -n"]),
        ({"shm_free": 1 << 20}, {}, "error", "/dev/shm", ["1 MiB free", "--shm-size"]),
        ({"shm_total": GIB // 16, "shm_free": GIB // 16}, {}, "warning", "/dev/shm", ["64 MiB", "--shm-size"]),
        ({"memory_limit": GIB}, {"memory": 4 * GIB}, "warning", "memory", ["limit of 1.0 GiB", "--memory"]),
        ({"memory_free": GIB // 8}, {}, "warning", "memory", ["128 MiB free", "workers_per_node"]),
        ({}, {"GPU": 1}, "error", "GPU", ["1 in Ray", "--num-gpus=0"]),
        ({"gpus": 1, "torch_cuda": None}, {}, "warning", "GPU", ["torch without CUDA", "Install torch"]),
        ({"gpus": 1, "torch_cuda": "12.4"}, {}, "warning", "GPU", ["0 in Ray", "--num-gpus"]),
    ],
)
def test_what_is_wrong_with_a_node(
    facts: dict[str, Any], changes: dict[str, Any], resources: dict[str, float], level: str, check: str, words: Any
) -> None:
    findings = [each for each in of_node({**facts, **changes}, "10.0.0.2", node(**resources)) if each.level != "ok"]
    assert worst(findings) == [(level, check)]
    line = str(findings[0])
    assert line.startswith(level) and "10.0.0.2" in line and "\n" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("package", "version", "level"),
    [
        ("rayvec", "0.0.1", "error"),
        ("python", "3.9.1", "error"),
        ("python", "3.11.99", "warning"),
        ("ray", "2.49.0", "error"),
        ("numpy", "1.26.4", "error"),
        ("numpy", "2.0.99", "warning"),
        ("gymnasium", None, "error"),
        ("torch", "1.0", "warning"),
        ("torch", None, "warning"),
    ],
)
def test_versions_that_differ(facts: dict[str, Any], package: str, version: str | None, level: str) -> None:
    theirs = {**facts, "versions": {**facts["versions"], package: version}}
    (finding,) = of_versions(theirs, {**facts, "versions": {**facts["versions"], "python": "3.11.7"}}, "10.0.0.2")
    assert finding.level == level and package in finding.found
    if version:
        assert version in finding.found


def test_the_same_version_with_other_code(facts: dict[str, Any]) -> None:
    findings = list(of_versions({**facts, "digest": "0"}, facts, "10.0.0.2"))
    assert worst(findings) == [("error", "versions")] and "other" not in str(findings[0])


def test_a_slow_network_and_a_narrow_one() -> None:
    levels = [of_network("a", *each).level for each in ((1e-4, 1e9), (0.05, 1e9), (1e-4, 1e6))]
    assert levels == ["ok", "warning", "warning"]


def fake_groups(root: Path, groups: str, files: dict[str, str]) -> None:
    real = {"proc/self/cgroup": groups, "proc/meminfo": "MemAvailable: 1024 kB\n"}
    ports = {"proc/sys/net/ipv4/ip_local_port_range": "32768 60999\n"}
    for name, text in {**real, **ports, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev/shm").mkdir(parents=True)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n", "memory.max": "1048576\n"}),
        (
            "0::/a/b\n",
            {
                **{"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n", "cpu.max": "800000 100000\n"},
                **{"a/b/memory.max": "1048576\n", "a/memory.max": "max\n"},
            },
        ),
        (
            "4:memory:/x\n1:cpu,cpuacct:/x\n0::/\n",
            {
                **{"cpu/x/cpu.cfs_quota_us": "150000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
                **{"cpu/cpu.cfs_quota_us": "-1\n", "memory/x/memory.limit_in_bytes": "1048576\n"},
                "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            },
        ),
    ],
    ids=["container", "nested", "version 1"],
)
def test_limits_of_control_groups(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    fake_groups(tmp_path, groups, files)
    found = read_facts(tmp_path)
    assert found["quota_cores"] == 1.5 and found["memory_limit"] == 1048576 and found["memory_free"] == 1048576


def test_no_limits(tmp_path: Path) -> None:
    fake_groups(tmp_path, "0::/\n", {})
    found = read_facts(tmp_path)
    assert found["quota_cores"] is None and found["memory_limit"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_command_on_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--env-id", "CartPole-v1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["level"] == "warning"  # its nodes have more cores in Ray than the machine has
    found = {(each["check"], each["level"]) for each in report["findings"]}
    checks = {"versions", "open files", "/dev/shm", "port there", "network", "port back", "environment", "setting"}
    assert found >= {(check, "ok") for check in checks} | {("cores", "warning")}
    (setting,) = (each["found"] for each in report["findings"] if each["check"] == "setting")
    for option in ("--num-envs", "--num-nodes 2", "--workers-per-node", "--inference"):
        assert option in setting


def test_an_unknown_environment_is_refused(assert_refused: Any) -> None:
    assert_refused(["doctor", "--env-id", "NoSuch-v0"], "NoSuch-v0")


@pytest.mark.slow
def test_an_address_where_nothing_answers(tmp_path: Path) -> None:
    with running(["doctor", "--address", "127.0.0.1:1"], tmp_path) as command:
        assert command.process.wait(150) == 1
    errors = [line for line in command.stdout.read_text().splitlines() if line.startswith("error")]
    (line,) = (line for line in errors if "127.0.0.1:1" in line)  # this machine may have faults of its own
    assert "ray start --head" in line and "Remedy:" not in line


def test_the_fit_that_stands_in_recommends_chunks_for_short_steps() -> None:
    best = recommend(DEFAULT_FIT, Setting(2, 8, step_s=1e-4), 16, 8, Cluster())
    assert best.inference == "worker" and best.num_envs == 16


@pytest.mark.parametrize(("step_s", "per_core"), [(1e-5, 8), (0.1, 1)])
def test_short_steps_want_more_environments_than_cores(step_s: float, per_core: int) -> None:
    node = Node("a", "host", "127.0.0.1", {"CPU": 4.0}, True)
    finding = recommended([(node, {"step_s": step_s, "sigma": 0.0, "obs_bytes": 16})], [])
    assert f"--num-envs {4 * per_core} " in finding.found and "--workers-per-node 4" in finding.found


def test_a_finding_that_ends_with_a_full_stop_gets_no_second_one() -> None:
    text = str(Finding("error", "driver", "ray", "no Ray answers.", "A run cannot start.", "Start Ray."))
    assert text.endswith("no Ray answers. A run cannot start. Start Ray.")
