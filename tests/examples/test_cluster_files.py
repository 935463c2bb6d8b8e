"""The files of examples/cluster: their syntax and structure, without a scheduler."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rayvec

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
PINNED_RAY = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def documents(name: str) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((CLUSTER / name).read_text())


def check_cluster(spec: dict[str, Any]) -> None:
    """Asserts that pods have what rayvec needs."""
    assert spec["rayVersion"] == PINNED_RAY and spec["authOptions"] == {"mode": "token"}
    head, workers = spec["headGroupSpec"], spec["workerGroupSpecs"]
    for group in (head, *workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        (container,) = pod["containers"]
        assert container["image"] == f"rayvec:{rayvec.__version__}"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    for group in workers:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize(("name", "kind"), [("raycluster.yaml", "RayCluster"), ("rayjob.yaml", "RayJob")])
def test_kuberay(name: str, kind: str) -> None:
    claim, resource = documents(name)
    assert claim["kind"] == "PersistentVolumeClaim"
    assert resource["apiVersion"] == "ray.io/v1" and resource["kind"] == kind
    spec = resource["spec"]
    if kind == "RayJob":
        subprocess.run(["bash", "-n", "-c", spec["entrypoint"]], check=True)
        spec = spec["rayClusterSpec"]
    check_cluster(spec)


def test_compose() -> None:
    (compose,) = documents("compose.yaml")
    for service in compose["services"].values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == f"/run/secrets/{service['secrets'][0]}"
        assert service["shm_size"] and service["ulimits"]["nofile"] >= 65536
        assert service["image"] == f"rayvec:{rayvec.__version__}" and (ROOT / service["build"]["dockerfile"]).exists()
        assert service["command"].startswith("ray start") and "ports" not in service
    assert compose["networks"]["cluster"]["internal"] and set(compose["secrets"]) == {"ray_token"}
    assert compose["services"]["worker"]["deploy"]["replicas"] == 2


def test_dockerfile() -> None:
    lines = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line for line in lines if line and not line.startswith("#")]
    bases = [step.split()[1] for step in steps if step.startswith("FROM")]
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base) for base in bases)
    last_user = [step for step in steps if step.startswith("USER")][-1]
    assert last_user == "USER ray" and steps.index(last_user) > max(
        number for number, step in enumerate(steps) if step.startswith("RUN")
    )
    installs = [step for step in steps if "pip install" in step]
    assert installs and all(
        "--constraint /tmp/constraints.txt" in step and "--no-cache-dir" in step for step in installs
    )
    ignored = (CLUSTER / "Dockerfile.dockerignore").read_text().split()
    copied = [word for step in steps if step.startswith("COPY") and "--from" not in step for word in step.split()[1:-1]]
    assert ignored[0] == "*"
    for name in copied:
        assert (ROOT / name).exists() and f"!{name}" in ignored


def test_autoscaler_file_fits_the_schema_of_ray() -> None:
    import jsonschema
    import ray.autoscaler

    (config,) = documents("aws.yaml")
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "RAY_AUTH_MODE=token" in config[commands][-1]
    assert any(f"ray[default]=={PINNED_RAY}" in command for command in config["setup_commands"])
    assert f"~/rayvec-{rayvec.__version__}-py3-none-any.whl" in config["file_mounts"]


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert "set -euo pipefail" in text and "RAY_AUTH_MODE=token" in text
