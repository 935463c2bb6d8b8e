"""Every example runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from rayvec.config import CONFIGS

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {"own_algorithm.py": 2048, "train_cartpole.py": 1024, "vector_env.py": 20}


def test_none_is_left_out() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SMALL)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", SMALL)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(CONFIGS, "reinforce", raising=False)  # and again after the example that registers it
    spec = importlib.util.spec_from_file_location(f"example_{name[:-3]}", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    module.main(SMALL[name])
    assert "episodes" in capsys.readouterr().out or (tmp_path / "runs").is_dir()
