"""Pictures of several runs, and the page of one."""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from conftest import AssertRefused
from helpers.training_kit import tiny
from matplotlib.figure import Figure

import rayvec
from rayvec import PPOConfig
from rayvec.cli import main
from rayvec.config.references import refer
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


def test_runs_are_grouped_by_what_they_learn(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = read_runs([runs / name for name in ("a1", "a2", "b1", "c1")])
    assert [(group.env_id, group.label, len(group.training)) for group in groups] == [
        ("CartPole-v1", "PPO, learning_rate=0.008", 2),
        ("CartPole-v1", "PPO, learning_rate=0.001", 1),
        ("Pendulum-v1", "PPO", 1),
    ]
    assert [len(group.final) for group in groups] == [2, 1, 1]
    assert [evaluations.shape for evaluations in groups[0].evaluations] == [(2, 1)] * 2
    plot_runs(groups, tmp_path / "one.png")
    picture = matplotlib.image.imread(tmp_path / "one.png")
    assert picture.shape[1] >= 1000 and picture.std() > 0.01
    out = tmp_path / "two.png"
    # the third is what `rayvec plot runs/*` passes where a picture is beside the runs
    assert main(["plot", str(runs / "a1"), str(runs / "a2"), str(tmp_path / "one.png"), "--out", str(out)]) == 0
    assert "CartPole-v1 PPO (2 seeds): greedy" in capsys.readouterr().out and out.exists()
    for name, begins in {"a.pdf": b"%PDF", "a.SVG": b"<?xml", "plain": b"\x89PNG"}.items():
        plot_runs(groups, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_what_cannot_be_plotted(runs: Path, tmp_path: Path, assert_refused: AssertRefused) -> None:
    assert_refused(["plot", str(runs / "a1"), str(tmp_path / "typo")], "config.yaml")
    assert_refused(["plot", str(tmp_path)], "config.yaml")
    assert_refused(["plot", str(runs / "a1" / "config.yaml")], "There is no run to plot")
    assert_refused(["plot", str(runs / "a1"), "--out", str(tmp_path / "a.doc")], "a.doc is no picture", "pdf")
    assert_refused(["plot", str(runs / "a1"), "a" * 300], "File name too long")
    (tmp_path / "config.yaml").write_text((runs / "a1" / "config.yaml").read_text())
    assert_refused(["plot", str(tmp_path)], "ended episodes")
    metrics = (runs / "a1" / "metrics.jsonl").read_bytes()
    for damaged in (b"\xff\xfe\n", b"null\n", b'{"x": 1}\n'):
        (tmp_path / "metrics.jsonl").write_bytes(damaged)
        assert_refused(["plot", str(tmp_path)], "ended episodes")
        (tmp_path / "metrics.jsonl").write_bytes(metrics + damaged)
        read_runs([tmp_path])
    for damaged in (b"{", b"[]", b"\xff"):
        (tmp_path / "result.json").write_bytes(damaged)
        assert_refused(["plot", str(tmp_path)], "result.json")
    (tmp_path / "config.yaml").write_bytes(b"\xff")
    assert_refused(["plot", str(tmp_path)], "config.yaml")


def copied(runs: Path, run_dir: Path, changes: dict[str, Any]) -> Path:
    """Copies a run and changes settings in its config.yaml."""
    shutil.copytree(runs / "a1", run_dir)
    settings = {**load_config(run_dir).to_plain(), **changes}
    (run_dir / "config.yaml").write_text(json.dumps(settings))
    return run_dir


def test_labels_count_runs_and_seeds(runs: Path, tmp_path: Path) -> None:
    copies = [copied(runs, tmp_path / f"{each}", {"checkpoint_interval_s": each}) for each in (1, 2)]
    texts = [str(*read_runs(each)) for each in ([runs / "a1"], [runs / "a1", *copies], [runs / "a2", *copies])]
    assert [re.findall(r"\(.*\)", text) for text in texts] == [
        ["(seed 1)"],
        ["(3 runs, seed 1)"],
        ["(3 runs, 2 seeds)"],
    ]
    (copies[0] / "result.json").unlink()
    (group,) = read_runs(copies)
    assert str(group).endswith(f"greedy {group.final[0]:.2f} (1 of 2 runs evaluated)")


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"init_from": "runs/a"}, ("init_from=None", "init_from=runs/a")),
        ({"precision": "bf16"}, ("precision=float32", "precision=bf16")),
        ({"learners": "decentralized"}, ("learners=driver", "learners=decentralized")),
        ({"learners": "driver", "track": "wandb", "plugin": []}, ()),
    ],
    ids=str,
)
def test_what_tells_groups_apart(
    runs: Path, tmp_path: Path, changes: dict[str, Any], differing: tuple[str, ...]
) -> None:
    groups = read_runs([runs / "a1", copied(runs, tmp_path / "a", changes)])
    assert [group.label for group in groups] == ([f"PPO, {text}" for text in differing] or ["PPO"])


def test_a_preset_is_named_in_place_of_its_settings(runs: Path, tmp_path: Path) -> None:
    changes = [PPOConfig().to_plain(), PPOConfig(preset="none", num_envs=4).to_plain()]
    run_dirs = [copied(runs, tmp_path / str(number), changes) for number, changes in enumerate(changes)]
    labels = [group.label for group in read_runs(run_dirs)]
    assert labels == ["PPO, preset=classic, num_envs=16", "PPO, preset=none, num_envs=4"]


def test_directories_beside_runs(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `rayvec plot runs/*` passes: trackers write there, too."""
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    (group,) = read_runs([runs / "a1", tmp_path / "wandb", runs / "a2", runs / "a1"])
    assert group.seeds == [1, 2]
    assert capsys.readouterr().err.startswith(f"rayvec: left out {tmp_path / 'wandb'}: ")


def test_runs_with_unnamed_parts_are_curves_of_their_own(runs: Path, tmp_path: Path) -> None:
    """Two lambdas have the same description."""
    unnamed = ("<lambda> (passed in Python)", "f.<locals>.g (passed in Python)", str(refer(functools.partial(int, 3))))
    for number, name in enumerate(unnamed):
        changes = {"network" if number else "env_id": name}
        run_dirs = [copied(runs, tmp_path / f"{seed}-{number}", {"seed": seed, **changes}) for seed in (1, 2)]
        groups = read_runs(run_dirs)
        assert [(group.label, group.seeds) for group in groups] == [
            (f"PPO, {run_dir}", [seed]) for seed, run_dir in enumerate(run_dirs, 1)
        ]
    for number, name in enumerate(["mine:make", "make (passed in Python)"]):  # the second is a function of a script
        named = [copied(runs, tmp_path / f"n{number}{seed}", {"seed": seed, "network": name}) for seed in (1, 2)]
        assert [group.seeds for group in read_runs(named)] == [[1, 2]]


def test_runs_that_cannot_be_read_are_left_out(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], assert_refused: AssertRefused
) -> None:
    bad = {"algorithm": {"algorithm": "mine"}, "setting": {"nmu_envs": 3}, "short": {}}
    run_dirs = [copied(runs, tmp_path / name, changes) for name, changes in bad.items()]
    (tmp_path / "short" / "metrics.jsonl").unlink()
    (group,) = read_runs([runs / "a1", *map(str, run_dirs)])
    assert group.seeds == [1]
    lines = capsys.readouterr().err.splitlines()
    for line, run_dir, word in zip(
        lines, run_dirs, ("algorithm 'mine'", "no setting nmu_envs", "ended episodes"), strict=True
    ):
        assert line.startswith(f"rayvec: left out {run_dir}: ") and word in line
    assert_refused(["plot", *map(str, run_dirs)], f"{run_dirs[0]}/config.yaml: ", "--plugin MODULE")
    with pytest.raises(ConfigError, match="nmu_envs"):
        rayvec.load(run_dirs[1])


def test_paths_may_be_strings(runs: Path, tmp_path: Path) -> None:
    plot_runs(read_runs([str(runs / "a1")]), str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").exists()


def test_the_directory_to_pass_in_place_of_another(runs: Path, tmp_path: Path, assert_refused: AssertRefused) -> None:
    shutil.copytree(runs / "a1", tmp_path / "s" / "seed1")
    assert_refused(["eval", "s/seed1/best.pt"], "config.yaml")
    (tmp_path / "s" / "seed1" / "best.pt").touch()
    assert_refused(
        ["eval", "s/seed1/best.pt"],
        "Pass the directory of the run, 's/seed1'. For this checkpoint add --checkpoint best.pt",
    )
    assert_refused(
        ["eval", "s/seed1/checkpoints/8.pt"],
        "the run, 's/seed1'. For this checkpoint add --checkpoint checkpoints/8.pt",
    )


def test_the_legend_is_below_the_axes_and_names_what_is_drawn(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    (group,) = read_runs([runs / "a1", runs / "a2"])
    for each in (group, replace(group, label="setting=value, " * 20, evaluations=[np.zeros((2, 0))])):
        plot_runs([each], tmp_path / "a.png")
    for figure, expected in zip(figures, ("dashed", "environment steps"), strict=True):
        figure.draw_without_rendering()
        (axes,) = figure.axes
        legend = axes.get_legend().get_window_extent()
        assert expected in axes.get_xlabel() and legend.y1 < axes.xaxis.label.get_window_extent().y0
        assert 0 <= legend.x0 < legend.x1 <= figure.bbox.x1 and legend.y0 >= 0
    assert "dashed" not in figures[1].axes[0].get_xlabel()


def test_a_run_of_one_line_is_a_dot(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    run_dir = copied(runs, tmp_path / "a", {})
    first, *_ = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    for text, marker in (((run_dir / "metrics.jsonl").read_text(), "None"), (first, "o")):
        (run_dir / "metrics.jsonl").write_text(text)
        plot_runs(read_runs([run_dir]), tmp_path / "a.png")
        (axes,) = figures.pop().axes
        assert axes.lines[0].get_marker() == marker
