"""Plugins: the algorithms that they register can be trained, resumed and evaluated on the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.training_kit import HERE, SMALL, options

import rayvec
from rayvec.cli import main
from rayvec.config import CONFIGS, TrainConfig
from rayvec.errors import ConfigError

PLUGIN = "helpers.plugin_algorithm"
TINY = [*options({**SMALL, **HERE}), "--total-steps=64", "--eval-episodes=2"]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forgets the algorithm, as a process that begins."""
    yield
    CONFIGS.pop("plugged", None)
    sys.modules.pop(PLUGIN, None)


@pytest.mark.parametrize(
    "line",
    [
        "--plugin {0} train plugged",
        pytest.param("train --plugin {0} plugged", marks=pytest.mark.slow),
        pytest.param("train plugged --plugin={0}", marks=pytest.mark.slow),
    ],
)
def test_it_may_stand_anywhere(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "a"
    assert main([*line.format(PLUGIN).split(), *TINY, "--bonus=2", f"--run-dir={run_dir}"]) == 0
    assert "algorithm: plugged" in (run_dir / "config.yaml").read_text()
    CONFIGS.pop("plugged")
    sys.modules.pop(PLUGIN)
    assert main(["eval", str(run_dir), "--episodes=2"]) == 0  # which finds the plugin in the run's settings
    assert main(["train", "--plugin", PLUGIN, "plugged", "--resume", str(run_dir)]) == 0
    assert main(["train", "--plugin", PLUGIN, "plugged", *TINY, f"--run-dir={run_dir}"]) == 2
    assert f"rayvec train plugged --plugin {PLUGIN} --resume {run_dir}" in capsys.readouterr().err


def test_a_module_of_the_working_directory(tmp_path: Path) -> None:
    """In a process of its own, whose path does not name that directory."""
    (tmp_path / "mine.py").write_text(f"import {PLUGIN}\n")
    code = "import sys; sys.path = [p for p in sys.path if p]; from rayvec.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "train", "--plugin", "mine", "plugged", "--help"]
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": ":".join(paths)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "--bonus" in done.stdout, done.stderr


def test_one_that_can_not_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plugin", "no_such_module", "plugged"]) == 2
    assert "The plugin 'no_such_module' can't be imported (ModuleNotFoundError" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="plugin 'no_such_module'"):
        TrainConfig.from_plain({"algorithm": "plugged", "plugin": ["no_such_module"]})
    with pytest.raises(ConfigError, match="plugin 'no_such_module'"):
        rayvec.train(rayvec.PPOConfig(plugin=("no_such_module",), run_dir=tmp_path / "a"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("args", [["train", "--plugin"], ["--plugin=", "train"], ["train", "--plugin", "--seed", "3"]])
def test_an_option_without_a_module(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert "plugin" in capsys.readouterr().err
