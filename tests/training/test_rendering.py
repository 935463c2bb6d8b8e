"""Videos show what was evaluated, and what can't be shown says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import AssertRefused
from helpers.training_kit import tiny

import rayvec
from rayvec.cli import main

pytestmark = pytest.mark.filterwarnings(  # of imageio
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
ALLOWED = ("helpers.wrap:pictured", "helpers.wrap:all_allowed")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"wrappers": ALLOWED, "step_timeout_s": 60, "workers_per_node": 1},
        pytest.param({"recurrent": "gru", "recurrent_size": 8}, marks=pytest.mark.slow),
    ],
    ids=["plain", "mask in infos", "memory"],
)
def test_a_video_shows_the_first_episode_of_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    import imageio.v2 as imageio

    settings = {"wrappers": ALLOWED[:1], **changes, "total_steps": 64, "eval_episodes": 1}
    rayvec.train(tiny(tmp_path / "a", **settings))
    (episode_return,) = json.loads((tmp_path / "a" / "result.json").read_text())["eval_returns"]
    path = tmp_path / "out.mp4"
    assert main(["eval", str(tmp_path / "a"), "--episodes", "1", "--video", str(path)]) == 0
    shown = capsys.readouterr()
    assert f"return {episode_return:.2f} in {path}" in shown.err and shown.out.startswith("mean return")
    with imageio.get_reader(path) as reader:
        frames = [frame for frame in reader]
    assert len(frames) == int(episode_return) + 1 and frames[0].shape == (34, 48, 3)
    assert len({int(frame.mean()) for frame in frames}) > 3


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose environments have pictures, have none, draw with pygame, and are vector environments."""
    folder = tmp_path_factory.mktemp("runs")
    runs: dict[str, dict[str, Any]] = {
        "pictured": {"wrappers": ALLOWED[:1]},
        "unpictured": {"wrappers": ("helpers.wrap:unpictured",)},
        "cartpole": {},
        "native": {"native": "helpers.native_envs:cartpoles"},
    }
    for name, settings in runs.items():
        rayvec.train(tiny(folder / name, total_steps=64, eval_episodes=0, **settings))
    return folder


@pytest.mark.parametrize(
    ("run", "arguments", "words"),
    [
        ("pictured", ["--video", "out.gif"], [".mp4", "out.gif"]),
        ("pictured", ["--video", "nowhere/out.mp4"], ["in a folder that exists"]),
        ("pictured", ["--video", "/proc/out.mp4"], ["ffmpeg could not write"]),
        ("pictured", ["--render", "human"], ["There is no screen", "DISPLAY"]),
        ("pictured", ["--checkpoint", "best.pt"], ["best.pt"]),
        ("unpictured", ["--video", "out.mp4"], ["'rgb_array'", "CartPole-v1 has the render modes []"]),
        ("native", ["--video", "out.mp4"], ["no single environment", "native_envs:cartpoles"]),
        ("cartpole", ["--video", "out.mp4"], ["draws with", "pygame"]),
    ],
)
def test_what_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch,
    assert_refused: AssertRefused,
    run_dirs: Path,
    run: str,
    arguments: list[str],
    words: list[str],
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert_refused(["eval", str(run_dirs / run), "--episodes", "2", *arguments], *words)


def test_without_the_package(run_dirs: Path, monkeypatch: pytest.MonkeyPatch, assert_refused: AssertRefused) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert_refused(["eval", str(run_dirs / "pictured"), "--video", "out.mp4"], "imageio[ffmpeg]")


@pytest.mark.slow
def test_a_window_is_opened_where_there_is_a_screen(
    run_dirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver of SDL's that draws nowhere stands for the screen."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert main(["eval", str(run_dirs / "cartpole"), "--episodes", "1", "--render", "human"]) == 0
    assert "an episode with return" in capsys.readouterr().err
