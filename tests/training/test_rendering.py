"""Videos show what was evaluated, and what can't be shown says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
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
