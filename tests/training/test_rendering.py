"""Videos show what was evaluated, and what can't be shown says why."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import AssertRefused
from helpers.training_kit import tiny

import rayvec
from rayvec.cli import main
from rayvec.training.rendering import render_episode

pytestmark = pytest.mark.filterwarnings(  # of imageio
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def test_a_video_has_a_frame_for_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import imageio.v2 as imageio

    rayvec.train(tiny(tmp_path / "a", total_steps=64, wrappers=("helpers.wrap:pictured",)))
    returns = json.loads((tmp_path / "a" / "result.json").read_text())["eval_returns"]
    path = tmp_path / "out.mp4"
    assert main(["eval", str(tmp_path / "a"), "--episodes", "4", "--video", str(path)]) == 0
    said = capsys.readouterr()
    episode_return = render_episode(tmp_path / "a", path)
    assert f"return {episode_return:.2f} in {path}" in said.err and said.out.startswith("mean return")
    assert episode_return in returns
    with imageio.get_reader(path) as reader:
        frames = [frame for frame in reader]
    assert len(frames) == int(episode_return) + 1 and frames[0].shape == (34, 48, 3)
    assert len({int(frame.mean()) for frame in frames}) > 3


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"recurrent": "gru", "recurrent_size": 8}, marks=pytest.mark.slow),
        {
            "wrappers": ("helpers.wrap:pictured", "helpers.wrap:all_allowed"),
            "step_timeout_s": 60,
            "workers_per_node": 1,
        },
    ],
    ids=["memory", "mask"],
)
def test_an_agent_with_memory_and_masks_in_infos_are_shown(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = {"wrappers": ("helpers.wrap:pictured",), **changes, "eval_episodes": 1}
    rayvec.train(tiny(tmp_path / "a", total_steps=64, **settings))
    returns = json.loads((tmp_path / "a" / "result.json").read_text())["eval_returns"]
    assert render_episode(tmp_path / "a", tmp_path / "out.mp4") == returns[0]


def test_sub_batches_cannot_be_shown(tmp_path: Path, assert_refused: AssertRefused) -> None:
    """Else a video would show the environment of the default id."""
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0, native="helpers.native_envs:cartpoles"))
    video = ["--video", str(tmp_path / "out.mp4")]
    assert_refused(["eval", str(tmp_path / "a"), *video], "a single environment", "native_envs:cartpoles")


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a run whose environments have pictures."""
    run_dir = tmp_path_factory.mktemp("pictured") / "a"
    rayvec.train(tiny(run_dir, total_steps=64, eval_episodes=0, wrappers=("helpers.wrap:pictured",)))
    return str(run_dir)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--video", "out.gif"], [".mp4", "out.gif"]),
        (["--video", "nowhere/out.mp4"], ["in a folder that exists"]),
        (["--video", "/proc/out.mp4"], ["/proc/out.mp4, which ffmpeg could not write"]),
        (["--render", "human"], ["DISPLAY", "Got: none"]),
        (["--checkpoint", "best.pt"], ["best.pt"]),
    ],
)
def test_what_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch,
    assert_refused: AssertRefused,
    pictured: str,
    arguments: list[str],
    words: list[str],
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert_refused(["eval", pictured, "--episodes", "2", *arguments], *words)


def test_environments_without_pictures(tmp_path: Path, assert_refused: AssertRefused) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0, wrappers=("helpers.wrap:unpictured",)))
    assert_refused(["eval", str(tmp_path / "a"), "--video", "out.mp4"], "'rgb_array'", "which has none")


@pytest.mark.slow
def test_a_window_is_opened_where_there_is_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_refused: AssertRefused, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver of SDL's that draws nowhere stands for the screen. A screen that does not exist is none."""
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    arguments = ["eval", str(tmp_path / "a"), "--episodes", "1", "--render", "human"]
    for name, value in (("DISPLAY", ":4242"), ("SDL_VIDEODRIVER", "dummy")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(arguments) == 0
    assert "an episode with return" in capsys.readouterr().err
    monkeypatch.delenv("SDL_VIDEODRIVER")
    assert_refused(arguments, "a screen", "DISPLAY=:4242")


def test_a_disk_that_can_only_be_read(
    pictured: str, monkeypatch: pytest.MonkeyPatch, assert_refused: AssertRefused
) -> None:
    """Nothing can be written into /proc; there, as on such a disk, nothing can be removed either."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", unlink)
    assert_refused(["eval", pictured, "--video", "/proc/out.mp4"], "A video is written into a file")


def test_packages_that_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_refused: AssertRefused
) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert_refused(
        ["eval", str(tmp_path / "a"), "--video", str(tmp_path / "out.mp4")], "Install that package", "pygame"
    )
    monkeypatch.setitem(sys.modules, "imageio", None)
    assert_refused(["eval", str(tmp_path / "a"), "--video", str(tmp_path / "out.mp4")], "rayvec[video]")
