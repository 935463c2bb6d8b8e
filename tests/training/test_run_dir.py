"""Where a run's environments are stepped, and its directory: whole or absent, used by one process, resumed exactly."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.own_envs import FailsOnce
from helpers.training_kit import lengthen, options, tiny

import rayvec
from rayvec import PPOConfig
from rayvec.cli import main
from rayvec.errors import CheckpointError, ConfigError
from rayvec.training import checkpoint
from rayvec.training.atomic_files import written_whole
from rayvec.training.run_dir import load_run, locked, read_metrics


def test_one_process_at_a_time_trains_in_a_directory(tmp_path: Path) -> None:
    run_dir = rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0)).run_dir
    with locked(run_dir), pytest.raises(ConfigError, match="Another process trains in"):
        rayvec.resume(run_dir)
    rayvec.resume(run_dir)


@pytest.mark.parametrize("part", ["learner", "collector"])
def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path, part: str) -> None:
    run_dir = rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0)).run_dir
    state = load_run(run_dir)[1]
    checkpoint.save(run_dir / "checkpoint.pt", {**state, part: {"something": 1}})
    with pytest.raises(CheckpointError, match=r"something|first_step|noise_seed"):
        rayvec.resume(run_dir)


def test_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match=r"which exists\. Pass another run_dir\.$"):
        rayvec.train(tiny(tmp_path / "a"))
    assert not list((tmp_path / "a").iterdir())
    (tmp_path / "a" / "config.yaml").touch()
    with pytest.raises(
        ConfigError, match=r"which exists\. Resume that run \(.*--resume .*\), or pass another run_dir\.$"
    ):
        rayvec.train(tiny(tmp_path / "a"))


def test_a_resume_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    run_dir = rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0)).run_dir
    settings = (run_dir / "config.yaml").read_text()
    for other, words in (({"env": "Acrobot-v1"}, "env_id is"), ({"env_servers": {"command": "x"}}, "env_servers was")):
        with pytest.raises(ConfigError, match=words):
            rayvec.resume(run_dir, total_steps=640, **other)
    assert (run_dir / "config.yaml").read_text() == settings


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml can't be read: No such file"):
        rayvec.resume(tmp_path)
    (tmp_path / "config.yaml").write_text(PPOConfig().to_yaml())
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        rayvec.resume(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 half a")
    with pytest.raises(CheckpointError, match=r"truncated.*Restore the file from a copy"):
        rayvec.resume(tmp_path)


def test_resuming_a_finished_run_only_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = rayvec.train(tiny(tmp_path / "a", total_steps=64))
    printed = capsys.readouterr().err
    assert "all its" not in printed
    assert printed.splitlines()[-2].startswith("64/64 steps") and printed.endswith("evaluating up to 6 episodes\n")
    again = rayvec.resume(tmp_path / "a")
    assert "rayvec: the run has taken all its 64 steps\n" in capsys.readouterr().err
    assert (again.total_steps, again.eval_return_mean) == (first.total_steps, first.eval_return_mean)
    assert [line["steps"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl")] == [64]


DECISIONS = """
import os, sys
from rayvec import PPOConfig
from rayvec.training.environments import choose_engine
def chosen(**settings):
    return choose_engine(PPOConfig(**settings)).num_nodes
assert chosen() == 0
assert chosen(num_nodes=2) == 2
assert chosen(address="host:6379") is None
assert chosen(num_learners=2) == 0 and chosen(learners="dedicated") is None
os.environ["RAY_ADDRESS"] = "host:6379"
assert chosen() is None and chosen(num_nodes=0) == 0
del os.environ["RAY_ADDRESS"]
assert "ray" not in sys.modules
"""

COMMANDS = """
from rayvec.cli import main
small = "--num-envs 4 --num-steps 16 --minibatch-size 32 --total-steps 64 --eval-episodes 4 --run-dir a".split()
assert main(["train", "ppo", *small]) == 0
assert main(["eval", "a", "--episodes", "4"]) == 0
assert main(["train", "ppo", *small[:-1], "b", "--num-learners", "2"]) == 0
assert "ray" not in sys.modules
"""


def test_train_and_eval_use_ray_only_if_something_asks_for_it(tmp_path: Path) -> None:
    """In a process of its own, where Ray is not initialised."""
    command = [sys.executable, "-c", DECISIONS + COMMANDS]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stderr.count("rayvec: 4 environments on this machine, without Ray\n") == 3
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert f"mean return {result['eval_return_mean']:.2f}" in done.stdout


@pytest.mark.parametrize("action", ["raise", pytest.param("hang", marks=pytest.mark.slow)])
def test_environments_restart_in_a_run(tmp_path: Path, action: str) -> None:
    where = {"workers_per_node": 1, "step_timeout_s": 3.0} if action == "hang" else {}
    env = lambda: FailsOnce(tmp_path / "failed", action)  # noqa: E731
    result = rayvec.train(tiny(tmp_path / "a", total_steps=64, on_env_error="restart", **where), env=env)
    assert result.total_steps >= 64 and (tmp_path / "failed").exists()


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
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)  # which ``fills_the_disk`` lowers
    try:
        assert main(["train", "ppo", "--resume", str(run_dir), *options({"checkpoint_interval_s": 0})]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert "File too large" in error and f"resume with: rayvec train ppo --resume {run_dir}" in error
    assert not list(run_dir.glob("*.tmp"))
    for name in ("learning_curve.png", "result.json"):
        assert (run_dir / name).read_bytes() == whole[name]
    assert 64 <= load_run(run_dir)[1]["progress"]["steps"] < 6400
