"""Every example runs, and the files of examples/cluster have the right syntax and structure."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray.cloudpickle
import yaml

import rayvec
from rayvec.config import CONFIGS

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "callbacks.py": (2048, 1024),
    "cluster_cartpole.py": (1024, 2),
    "action_masks.py": (1024,),
    "cleanrl_ppo.py": (2048,),
    "curriculum.py": (1024, 2),
    "own_algorithm.py": (2048,),
    "pettingzoo_agents.py": (2_400,),
    "recurrent_cartpole.py": (2048,),
    "sb3_ppo.py": (1024, 5),
    "own_environment.py": (1024,),
    "own_network.py": (1024,),
    "sweep.py": (1024, 1),
    "vector_env.py": (20,),
    "tianshou_impala.py": (5_120, 1, 16),
    "tianshou_ppo_cartpole.py": (100, 20.0),
    "tianshou_ppo_one_machine.py": (160, 20.0),
    "tianshou_sac_pendulum.py": (10, -1600.0),
    "tianshou_dqn_atari.py": (10, 1, 1),
}
SLOW = ("action_masks", "callbacks", "cleanrl", "cluster", "curriculum", "own_", "pettingzoo", "recurrent", "sb3")
SLOW += ("sweep", "tianshou")


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name[:-3]}", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    return module


def test_none_is_left_out() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SMALL)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith(SLOW) else name for name in SMALL]
)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = loaded(name, monkeypatch)
    if hasattr(module, "RayVectorEnv"):  # each worker would import torch and Tianshou
        monkeypatch.setattr(module, "RayVectorEnv", partial(module.RayVectorEnv, num_nodes=1, workers_per_node=1))
    for each in (cloudpickle, ray.cloudpickle):  # as if it were run as a script
        each.register_pickle_by_value(module)
    try:
        run = module.train if name.startswith("cluster") else module.main  # the cluster of the tests is there
        run(*SMALL[name])
    finally:
        for each in (cloudpickle, ray.cloudpickle):
            each.unregister_pickle_by_value(module)
        CONFIGS.pop("reinforce", None)  # which one of them registers
    assert "episodes" in capsys.readouterr().out or (tmp_path / "runs").is_dir()


@pytest.mark.parametrize(
    ("name", "page", "most", "used"),
    [
        ("tianshou_ppo_cartpole.py", "tianshou", 5, {"Collector", "SubprocVectorEnv"}),
        ("tianshou_ppo_one_machine.py", "tianshou", 5, {"Collector", "SubprocVectorEnv"}),
        ("sb3_ppo.py", "stable-baselines3", 1, {"SubprocVecEnv"}),
    ],
)
def test_few_lines_differ_from_the_script_without_rayvec(name: str, page: str, most: int, used: set[str]) -> None:
    """The diff that the docs show undoes everything of rayvec, and nothing else."""
    source = (EXAMPLES / name).read_text()
    page = (EXAMPLES.parent / "docs" / f"{page}.md").read_text()
    diff = page.split(f"`examples/{name}`", 1)[1].split("```diff\n", 1)[1].split("```", 1)[0].splitlines()
    added = [line[1:] for line in diff if line.startswith("+")]
    removed = [line[1:] for line in diff if line.startswith("-")]
    assert 1 <= len(added) <= most
    for line in added:
        assert source.count(f"{line}\n") == 1, line
        source = source.replace(f"{line}\n", "")
    code = "\n".join([*removed, source.split('"""', 2)[2]])
    assert "rayvec" not in code
    assert not used - set(re.findall(r"\w+", "\n".join(removed)))


EXAMPLE = Path(__file__).parents[1] / "examples" / "servers" / "other_python.py"


@pytest.mark.slow
def test_an_older_numpy_and_gymnasium(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It installs packages, for which it needs an index."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "other"], check=True)
    python = str(tmp_path / "other" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "numpy<2", "gymnasium==0.29.1"], check=True)
    runpy.run_path(str(EXAMPLE))["main"](python)
    printed = capsys.readouterr().out.split()
    assert printed[:6] == ["200", "steps", "of", "4", "environments", "in"] and int(printed[-2]) > 4


ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
PINNED_RAY = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def documents(name: str) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((CLUSTER / name).read_text())


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
