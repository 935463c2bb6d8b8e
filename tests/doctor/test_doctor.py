"""What `rayvec doctor` says about a machine and a cluster."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import running

from rayvec.cli import main
from rayvec.doctor.rules import connection, resources, versions

GIB = 1 << 30
FACTS: dict[str, Any] = {
    **{"versions": {"python": "3.11.7", "rayvec": "0.1.0", "ray": "2.60.0", "numpy": "2.4.6", "torch": "2.13.0"}},
    **{"cores": 8, "quota_cores": None, "niceness": 0, "files": 65536, "shm_free": GIB, "shm_total": GIB, "gpus": 0},
    "visible_gpus": None,
}
IN_RAY = {"CPU": 8, "object_store_memory": GIB / 2}


def test_a_node_in_order() -> None:
    findings = [*versions(FACTS, FACTS, "a"), *resources(FACTS, "a", IN_RAY, 0), connection("a", 1e-4, 1e-4)]
    assert {finding.level for finding in findings} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "in_ray", "level", "check", "words"),
    [
        ({"quota_cores": 1.5}, {}, "warning", "cores", ["8 in Ray", "quota of 1.5", "--num-cpus=2"]),
        ({"cores": 4}, {}, "warning", "cores", ["4 usable", "--num-cpus=4"]),
        ({"niceness": 15}, {}, "warning", "niceness", ["nice 15", "RAY_worker_niceness=0"]),
        ({"files": 100}, {}, "error", "open files", ["need 104", "ulimit -n"]),
        ({"files": 1024}, {}, "warning", "open files", ["ulimit -n"]),
        ({"shm_free": 1 << 20}, {}, "error", "/dev/shm", ["1 MiB free", "--shm-size"]),
        ({"shm_total": GIB // 16, "shm_free": GIB // 16}, {}, "warning", "/dev/shm", ["64 MiB", "--shm-size"]),
        ({}, {"GPU": 1}, "error", "GPU", ["1 in Ray", "--num-gpus=0"]),
        ({"gpus": 1, "visible_gpus": ""}, {"GPU": 1}, "warning", "GPU", ["see none", "CUDA_VISIBLE_DEVICES unset"]),
        ({"gpus": 1}, {}, "warning", "GPU", ["0 in Ray", "--num-gpus=1"]),
    ],
)
def test_what_is_wrong_with_a_node(
    changes: dict[str, Any], in_ray: dict[str, float], level: str, check: str, words: list[str]
) -> None:
    found = resources({**FACTS, **changes}, "10.0.0.2", {**IN_RAY, **in_ray}, 0)
    (finding,) = (each for each in found if each.level != "ok")
    assert (finding.level, finding.check) == (level, check)
    assert all(word in str(finding) for word in ["10.0.0.2", *words]) and "\n" not in str(finding)


@pytest.mark.parametrize(
    ("package", "version", "level"),
    [
        ("rayvec", "0.0.1", "error"),
        ("python", "3.9.1", "error"),
        ("python", "3.11.99", "warning"),
        ("ray", "2.49.0", "error"),
        ("numpy", "1.26.4", "error"),
        ("numpy", "2.0.99", "warning"),
        ("torch", "1.0", "warning"),
        ("torch", "missing", "warning"),
    ],
)
def test_versions_that_differ(package: str, version: str, level: str) -> None:
    theirs = {**FACTS, "versions": {**FACTS["versions"], package: version}}
    (finding,) = versions(theirs, FACTS, "10.0.0.2")
    assert finding.level == level and f"{package} {version}" in finding.found


@pytest.mark.parametrize(
    ("there", "back", "level", "word"),
    [
        (0.05, 1e-4, "warning", "inference='worker'"),
        ("TimeoutError: timed out", 1e-4, "error", "from the driver: TimeoutError"),
        (1e-4, "OSError: refused", "error", "to the driver: OSError"),
    ],
)
def test_connections(there: float | str, back: float | str, level: str, word: str) -> None:
    finding = connection("a", there, back)
    assert finding.level == level and word in str(finding)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_command_that_it_prints_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--env-id", "CartPole-v1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["level"] == "warning"  # its nodes have more cores in Ray than the machine has
    found = [(each["check"], each["level"]) for each in report["findings"]]
    for check in ("versions", "open files", "/dev/shm", "connection", "environment"):
        assert found.count((check, "ok")) >= 2, check
    texts = {each["check"]: each["found"] for each in report["findings"]}
    assert texts["environment"].startswith("CartPole-v1: steps ")  # which of both depends on what else the machine does
    program, *arguments = shlex.split(texts["command"])
    assert program == "rayvec" and "--num-nodes 2" in texts["command"]
    short = ["--total-steps", "64", "--eval-episodes", "1", "--run-dir", str(tmp_path / "run")]
    assert main([*arguments, *short]) == 0


@pytest.mark.slow
def test_an_address_where_nothing_answers(tmp_path: Path) -> None:
    with running(["doctor", "--address", "127.0.0.1:1"], tmp_path) as command:
        assert command.process.wait(150) == 1
    (line,) = (line for line in command.stdout.read_text().splitlines() if line.startswith("error  "))
    assert "127.0.0.1:1" in line and "ray start --head" in line
