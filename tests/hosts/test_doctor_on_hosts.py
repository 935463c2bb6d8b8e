"""`rayvec doctor` on a cluster with planted faults: each is found and explained."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.hosts import Program, block, cluster_of, limit, on_hosts
from helpers.network import DEADLINE_S, Cluster

import rayvec

pytestmark = on_hosts
DOCTOR = [sys.executable, "-m", "rayvec", "doctor"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A head in order, a host that is a narrow container, and one with other versions behind a firewall."""
    with cluster_of(1) as cluster:
        narrow = cluster.network.add(shm_mib=32)
        limit(narrow, "50000 100000", "1000000000")
        narrow.environment["RAY_worker_niceness"] = "15"
        few_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (1024, 1024))
        narrow.popen = partial(narrow.popen, preexec_fn=few_files)  # type: ignore[method-assign]
        cluster.join(narrow)
        other = cluster.network.add()
        package = Path(rayvec.__file__).parent
        shutil.copytree(package, tmp_path / "rayvec", ignore=shutil.ignore_patterns("__pycache__"))
        init = tmp_path / "rayvec" / "__init__.py"
        init.write_text(init.read_text().replace(f'"{rayvec.__version__}"', '"0.0.9"'))
        (tmp_path / "numpy-1.26.4.dist-info").mkdir()
        (tmp_path / "numpy-1.26.4.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 1.26.4\n")
        custom = "import sys, numpy; numpy.__version__, sys.modules['pyarrow'] = '1.26.4', None"  # pyarrow refuses it
        (tmp_path / "sitecustomize.py").write_text(custom)
        other.environment["PYTHONPATH"] = str(tmp_path)
        cluster.join(other)
        block(other)
        yield cluster


def test_planted_faults_are_found_and_explained(cluster: Cluster) -> None:
    command = *DOCTOR, "--address", cluster.address, "--env-id=CartPole-v1"
    with cluster.head.popen(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as doctor:
        found, errors = doctor.communicate(timeout=DEADLINE_S)
    print(found)
    assert doctor.returncode == 1, errors
    lines = found.splitlines()
    _, narrow, other = (host.address for host in cluster.network.hosts)
    for address, level, check, words in (
        (narrow, "warning", "cores", ["2 in Ray", "quota of 0.5", "--num-cpus=1"]),
        (narrow, "warning", "niceness", [f"nice {min(os.nice(0) + 15, 19)}", "RAY_worker_niceness=0"]),
        (narrow, "warning", "open files", ["1024 allowed", "ulimit -n 65536"]),
        (narrow, "warning", "/dev/shm", ["32 MiB", "--shm-size"]),
        (other, "error", "versions", ["rayvec 0.0.9", rayvec.__version__, "Install the same versions"]),
        (other, "error", "versions", ["numpy 1.26.4", "Install the same versions"]),
        (other, "error", "connection", ["from the driver", "firewall"]),
    ):
        start = f"{level:7}  {address:15}  {check:11}"
        assert any(line.startswith(start) and all(word in line for word in words) for line in lines), (start, words)
    head = [line for line in lines if f"  {cluster.head.address} " in line]
    assert head and all(line.startswith("ok") for line in head)
    for address in (cluster.head.address, narrow):
        assert any(line.startswith(f"{'ok':7}  {address:15}  environment") for line in lines)
    with Program(cluster.head, Path(__file__).with_name("programs.py"), "start") as program:
        line = program.line()
    print(f"other versions: ConfigError at the start: {line['seconds']:.1f}")
    versions = (f"rayvec {rayvec.__version__}", "rayvec 0.0.9", f"numpy {np.__version__}", "numpy 1.26.4")
    for word in (*versions, other):  # a run refuses that node
        assert word in line["error"]
