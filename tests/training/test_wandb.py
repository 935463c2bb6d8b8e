"""``track="wandb"``: Weights & Biases copies what TensorBoard gets, also when the run is resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.training_kit import HERE, SMALL, lengthen, options, tiny

import rayvec
from rayvec.errors import ConfigError
from rayvec.training.run_dir import load_run

COMMAND = [sys.executable, "-m", "rayvec", "train", "ppo"]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of this machine do not count."""
    for name in ("API_KEY", "PROJECT", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("CACHE_DIR", str(tmp_path / "cache"))):
        monkeypatch.setenv(f"WANDB_{name}", value)


def written(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.slow
def test_a_resumed_run_continues_in_the_same_run(tmp_path: Path) -> None:
    small = options({**SMALL, **HERE, "eval_episodes": 2, "total_steps": 128})
    subprocess.run([*COMMAND, *small, "--track=wandb", f"--run-dir={tmp_path / 'a'}"], check=True, cwd=tmp_path)
    lengthen(tmp_path / "a", 128, 192)
    subprocess.run([*COMMAND, f"--resume={tmp_path / 'a'}"], check=True, cwd=tmp_path)
    run_id = load_run(tmp_path / "a")[1]["progress"]["tracker_run"]
    files = written(tmp_path)
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    assert b"return_mean" in b"".join(path.read_bytes() for path in files)


BESIDE_A_RUN = """
import rayvec, wandb
from helpers.training_kit import tiny

mine = wandb.init(project="mine")
for name in ("a", "b"):
    rayvec.train(tiny(name, total_steps=64, eval_episodes=0, track="wandb"))
    assert wandb.run is mine
mine.log({"alive": 1})
mine.finish()
"""


@pytest.mark.slow
def test_a_run_that_is_open_is_used_and_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    subprocess.run([sys.executable, "-c", BESIDE_A_RUN], check=True, cwd=tmp_path)
    (path,) = written(tmp_path)
    assert b"return_mean" in path.read_bytes() and b"alive" in path.read_bytes()


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        rayvec.train(tiny(tmp_path / "a", track="wandb"))
    assert not (tmp_path / "a").exists()
