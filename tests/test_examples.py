"""Every example runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "train_cartpole.py": 1024,
    "vector_env.py": 20,
    "tianshou_ppo_cartpole.py": 100,
    "tianshou_sac_pendulum.py": 10,
    "tianshou_dqn_atari.py": 1,
}


def test_none_is_left_out() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SMALL)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", SMALL)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name))["main"](SMALL[name])
    assert "episodes" in capsys.readouterr().out or (tmp_path / "runs").is_dir()
