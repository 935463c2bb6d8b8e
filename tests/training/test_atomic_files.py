"""Files are whole or absent, also when the disk is full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.file_size_limit import file_size_limit
from helpers.training_kit import lengthen, options, tiny

import rayvec
from rayvec.cli import main
from rayvec.errors import ConfigError
from rayvec.training.atomic_files import written_whole
from rayvec.training.run_dir import load_run


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (pipe, tmp_path):
        with pytest.raises(ConfigError, match="it is no file"), written_whole(path) as file:
            file.write(b"new")
    assert list(tmp_path.iterdir()) == [pipe] and pipe.is_fifo()


def test_a_full_disk_ends_a_run_with_its_last_files_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "a"
    rayvec.train(tiny(run_dir, total_steps=64, eval_episodes=0, wrappers=("helpers.wrap:fills_the_disk",)))
    whole = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    lengthen(run_dir, 64, 6400)
    with file_size_limit():  # which ``fills_the_disk`` lowers
        assert main(["train", "ppo", "--resume", str(run_dir), *options({"checkpoint_interval_s": 0})]) == 1
    error = capsys.readouterr().err
    assert "File too large" in error and f"resume with: rayvec train ppo --resume {run_dir}" in error
    assert not list(run_dir.glob("*.tmp"))
    for name in ("learning_curve.png", "result.json"):
        assert (run_dir / name).read_bytes() == whole[name]
    assert 64 <= load_run(run_dir)[1]["progress"]["steps"] < 6400
