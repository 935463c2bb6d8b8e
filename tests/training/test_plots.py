"""Pictures of several runs: which ones are one line, and what is left out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from conftest import AssertRefused
from helpers.training_kit import tiny

import rayvec
from rayvec.cli import main
from rayvec.errors import ConfigError
from rayvec.training.plots import plot_runs, read_runs
from rayvec.training.run_dir import load_config

SETTINGS = {"eval_interval_steps": 128, "eval_episodes": 3, "total_steps": 256}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one setting, one of another, and another environment."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in {
        "a1": {"seed": 1},
        "a2": {"seed": 2},
        "b1": {"learning_rate": 1e-3},
        "c1": {"env_id": "Pendulum-v1", "total_steps": 1600, "eval_interval_steps": 1600},
    }.items():
        rayvec.train(tiny(folder / name, **{**SETTINGS, **changes}))
    return folder


def copied(runs: Path, run_dir: Path, changes: dict[str, Any]) -> Path:
    """Copies a run and changes settings in its config.yaml."""
    shutil.copytree(runs / "a1", run_dir)
    settings = {**load_config(run_dir).to_plain(), **changes}
    (run_dir / "config.yaml").write_text(json.dumps(settings))
    return run_dir


def test_runs_are_grouped_by_what_they_learn(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = read_runs([str(runs / name) for name in ("a1", "a2", "b1", "c1")])
    assert [(group.env_id, group.label, [run.config.seed for run in group.runs]) for group in groups] == [
        ("CartPole-v1", "PPO, learning_rate=0.008", [1, 2]),
        ("CartPole-v1", "PPO, learning_rate=0.001", [1]),
        ("Pendulum-v1", "PPO", [1]),
    ]
    assert [run.evaluations.shape for run in groups[0].runs] == [(2, 2)] * 2, "and the one after training"
    for name, begins in {"a.pdf": b"%PDF", "a.SVG": b"<?xml", "plain": b"\x89PNG"}.items():
        plot_runs(groups, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)
    picture = matplotlib.image.imread(tmp_path / "plain", format="png")
    assert picture.shape[1] >= 1000 and picture.std() > 0.01
    # the third and the fourth are what `rayvec plot runs/*` passes where other things are beside the runs
    (tmp_path / "wandb").mkdir()
    paths = [runs / "a1", runs / "a2", tmp_path / "wandb", tmp_path / "plain"]
    assert main(["plot", *map(str, paths), "--out", str(tmp_path / "b.png")]) == 0
    shown = capsys.readouterr()
    assert "CartPole-v1 PPO (runs: 2, seeds: 1, 2): greedy" in shown.out and (tmp_path / "b.png").exists()
    assert shown.err.startswith(f"rayvec: left out {tmp_path / 'wandb'}: ") and shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"init_from": "runs/a"}, ["PPO, init_from=None", "PPO, init_from=runs/a"]),
        ({"learners": "decentralized"}, ["PPO, learners=None", "PPO, learners=decentralized"]),
        ({"track": "wandb", "checkpoint_interval_s": 1}, ["PPO"]),
    ],
    ids=str,
)
def test_what_tells_groups_apart(runs: Path, tmp_path: Path, changes: dict[str, Any], labels: list[str]) -> None:
    run_dir = copied(runs, tmp_path / "a", changes)
    groups = read_runs([runs / "a1", run_dir])
    assert [group.label for group in groups] == labels


def test_an_encoding_without_every_character(runs: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "rayvec", "plot", str(runs / "a1"), "--out", str(tmp_path / "a.png")]
    done = subprocess.run(words, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert b"\\xb1" in done.stdout


def test_what_cannot_be_plotted(runs: Path, tmp_path: Path, assert_refused: AssertRefused) -> None:
    assert_refused(["plot", str(runs / "a1" / "config.yaml")], "There is no run to plot")
    assert_refused(["plot", str(runs / "a1"), "--out", str(tmp_path / "a.doc")], "a.doc is no picture", "pdf")
    assert_refused(["plot", str(runs / "a1"), "--out", str(tmp_path / "b" / "a.png")], "there is no directory")
    (tmp_path / "config.yaml").write_text((runs / "a1" / "config.yaml").read_text())
    metrics = (runs / "a1" / "metrics.jsonl").read_bytes()
    for damaged in (b"\xff\xfe\n", b"null\n", b'{"x": 1}\n'):
        (tmp_path / "metrics.jsonl").write_bytes(metrics + damaged)
        read_runs([tmp_path])
    for name, data in (
        ("metrics.jsonl", b'{"steps": 9, "episodes": 1}\n'),
        ("result.json", b"{"),
        ("result.json", b"[]"),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(metrics)
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match="There is no run to plot"):
            read_runs([tmp_path])
