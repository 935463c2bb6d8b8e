"""What importing costs: a worker loads no torch, a learner no Ray, and the package itself neither."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml

import rayvec

HEAVY = ("ray", "torch", "gymnasium", "tianshou", "stable_baselines3", "matplotlib", "tensorboard", "pandas")


def loaded_by(statement: str) -> set[str]:
    """Returns which of the heavy packages a fresh interpreter has loaded after `statement`."""
    report = f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    command = [sys.executable, "-W", "error", "-c", report]
    return set(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import rayvec; dir(rayvec)", set()),
        ("import rayvec; rayvec.errors.ConfigError; rayvec.Chunk", set()),
        ("import rayvec; rayvec.wrappers.ActionMask", {"gymnasium"}),
        ("import rayvec; rayvec.PPOConfig()", set()),
        ("import rayvec.cli", set()),
        ("import rayvec.envs.slices, rayvec.rollout.loop", {"gymnasium"}),
        ("import rayvec.node.worker_main", {"gymnasium"}),
        ("import rayvec.tianshou; dir(rayvec.tianshou)", set()),
        ("import rayvec.tianshou.env.pool_env", {"gymnasium"}),
        ("import rayvec.stable_baselines3; dir(rayvec.stable_baselines3)", set()),
        ("import rayvec.stable_baselines3.worker_env", {"gymnasium"}),
        ("import rayvec; rayvec.Policy", {"gymnasium"}),
        ("import rayvec.learners.ppo", {"gymnasium", "torch"}),
        (
            "import os, rayvec\n"
            "env = rayvec.RayVecEnv('CartPole-v1', 3, num_nodes=0, workers_per_node=0)\n"
            "assert env.rollout(lambda obs: (obs[:, 2] > 0).astype(int), 50).valid.all()\n"
            "assert env.worker_pids() == {'localhost/driver': [os.getpid()]}\n"
            "assert not open(f'/proc/self/task/{os.getpid()}/children').read()",
            {"gymnasium"},
        ),
        (
            "import rayvec.learners.ranks; from rayvec.distributed import allreduce_shared_memory, allreduce_torch",
            {"torch"},
        ),
    ],
)
def test_imports_are_light(statement: str, allowed: set[str]) -> None:
    assert loaded_by(statement) <= allowed


@pytest.mark.parametrize("name", rayvec.__all__)
def test_every_public_name_is_there_and_is_documented(name: str) -> None:
    assert name in dir(rayvec)
    value = getattr(rayvec, name)
    assert value is getattr(rayvec, name)
    assert name == "__version__" or value.__doc__


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("import rayvec.training.loop", marks=pytest.mark.slow),
        "from rayvec.training.loop import resume",
        pytest.param("import rayvec.cli", marks=pytest.mark.slow),
    ],
)
def test_train_can_be_called_whatever_was_imported_before(first: str) -> None:
    statement = f"{first}\nimport rayvec\nassert callable(rayvec.train), rayvec.train"
    subprocess.run([sys.executable, "-c", statement], check=True)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'teleport'"):
        rayvec.teleport  # noqa: B018


def test_the_installed_version_is_this_one() -> None:
    try:
        installed = version("rayvec")
    except PackageNotFoundError:
        pytest.skip("run from the source tree")
    assert installed == rayvec.__version__


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text())
    assert citation["version"] == rayvec.__version__ and citation["cff-version"] == "1.2.0"


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    root = Path(__file__).parents[1]
    workflow = yaml.safe_load((root / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    scripts = [command for command in commands if command.startswith(".ci/")]
    assert set(scripts) == {f".ci/{path.name}" for path in (root / ".ci").iterdir()}
    for script in scripts:
        subprocess.run(["bash", "-n", str(root / script)], check=True)
        assert (root / script).stat().st_mode & 0o100
