"""``--seeds``: several runs side by side, each as if it were alone, continued by the same command."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import assert_nothing_left, running
from helpers.training_kit import HERE, SMALL, assert_same, options

from rayvec.cli import main
from rayvec.config import PPOConfig
from rayvec.training import many_seeds
from rayvec.training.run_dir import load_run

SETTINGS = {**SMALL, **HERE, "total_steps": 600, "eval_episodes": 2, "env_id": "CartPole-v1"}
pytestmark = pytest.mark.timeout(600)  # commands in processes of their own, on a busy machine


def train(directory: Path, *args: str, **changes: object) -> int:
    return main(["train", "ppo", *options({**SETTINGS, **changes}), "--run-dir", str(directory), *args])


@pytest.mark.slow
def test_seeds_train_as_they_do_alone_and_finished_ones_are_not_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    assert train(together, "--seeds", "3", "1") == 0
    printed = capfd.readouterr()
    assert "seed 1: greedy return" in printed.err and "seed 3: greedy return" in printed.err
    assert "CartPole-v1 PPO (2 seeds): greedy" in printed.out and (together / "curves.png").stat().st_size > 10_000
    assert train(alone, "--seed", "3") == 0
    assert_same(*(load_run(each)[1]["learner"] for each in (together / "seed3", alone)))

    before = (together / "seed1" / "result.json").stat().st_mtime_ns
    assert train(together, "--seeds", "1", "2") == 0
    printed = capfd.readouterr()
    assert "seed 1: " not in printed.err and "seed 2: greedy return" in printed.err
    assert (together / "seed1" / "result.json").stat().st_mtime_ns == before

    assert train(together, "--seeds", "1", "4", gamma=0.5) == 2
    assert "gamma=0.5 after 0.98" in capfd.readouterr().err and not (together / "seed4").exists()


def test_a_file_in_the_place_of_the_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").touch()
    assert train(tmp_path / "a", "--seeds", "1", "2") == 2
    assert f"{tmp_path / 'a'}, which is a file" in capfd.readouterr().err


@pytest.mark.parametrize("args", [["1", "1"], ["1", "--seed", "2"], ["1", "--resume", "somewhere"], ["-1"], ["x"], []])
def test_refused(tmp_path: Path, args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = train(tmp_path / "a", "--seeds", *args)
    except SystemExit as exit_of_the_parser:
        code = exit_of_the_parser.code
    assert code == 2 and not (tmp_path / "a").exists()
    printed = capfd.readouterr()
    assert "seed" in printed.err + printed.out


def test_runs_that_use_all_there_is_follow_one_after_another() -> None:
    """A run on ranks of nodes of their own is on Ray although its settings name no nodes."""
    dedicated = PPOConfig(env_id="CartPole-v1", learners="dedicated", num_learners=1)
    assert many_seeds._divide_cores(dedicated, 3) == (1, [])
    at_once, options = many_seeds._divide_cores(PPOConfig(env_id="CartPole-v1", num_nodes=0), 3)
    assert at_once == min(3, len(os.sched_getaffinity(0))) and options[:2] == ["--num-nodes", "0"]


def test_a_directory_names_a_few_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = PPOConfig(env_id="CartPole-v1", seed=1)
    assert "seeds1-2" in many_seeds._free_directory(config, [1, 2]).name
    assert "seeds1-and-199-more" in many_seeds._free_directory(config, range(1, 201)).name


def test_every_run_gets_all_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first_plugin", "second_plugin"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found: list[str] = []

    def keep(config: Any, seeds: Sequence[int], args: Sequence[str]) -> None:
        found.extend(args)

    monkeypatch.setattr(many_seeds, "train_seeds", keep)
    assert train(tmp_path / "a", "--seeds", "1", "--plugin", "first_plugin", "--plugin=second_plugin") == 0
    assert [arg for arg in found if "plugin" in arg] == ["--plugin=first_plugin", "--plugin=second_plugin"]


LEAVES_A_PROGRAM = """
import subprocess
import gymnasium

def make():
    subprocess.Popen(["sleep", "600"])
    return gymnasium.make("Pendulum-v1")
"""


@pytest.mark.slow
def test_a_run_ends_with_its_process_and_needs_no_episode(tmp_path: Path) -> None:
    """A program that an environment has started keeps the output of the run open."""
    (tmp_path / "leaves.py").write_text(LEAVES_A_PROGRAM)
    settings = {**SETTINGS, "env_id": "leaves:make", "total_steps": 64, "run_dir": "a"}
    with running(["train", "ppo", *options(settings), "--seeds", "1"], tmp_path) as command:
        assert command.process.wait(300) == 0, command.stderr.read_text()
        assert any("sleep" in line for line in command.left())
        assert "There is no picture of the curves" in command.stdout.read_text()
        for pid in command.pids():
            os.kill(pid, signal.SIGKILL)


FAILS_ONCE = """
import os
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

def make():
    try:
        os.close(os.open("failed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return CartPoleEnv()
    raise OSError("no licence is free")
"""


@pytest.mark.slow
def test_a_seed_that_fails_leaves_the_others_and_is_continued(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(FAILS_ONCE)
    settings = {**SETTINGS, "env_id": "once:make", "run_dir": "a"}
    args = ["train", "ppo", *options(settings), "--seeds", "1", "2"]
    with running(args, tmp_path) as command:
        assert command.process.wait(300) == 1
        assert_nothing_left(command)
    error = command.stderr.read_text()
    assert "no licence is free" in error and "an error, printed above, with seed" in error and "Traceback" not in error
    assert len(list((tmp_path / "a").glob("seed*/result.json"))) == 1
    with running(args, tmp_path) as command:
        assert command.process.wait(300) == 0, command.stderr.read_text()
    assert len(list((tmp_path / "a").glob("seed*/result.json"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_every_run_and_the_same_command_continues(tmp_path: Path, signum: int) -> None:
    settings = {**SETTINGS, "total_steps": 2_000_000, "compile": False, "run_dir": "a"}
    with running(["train", "ppo", *options(settings), "--seeds", "1", "2", "3"], tmp_path) as command:
        first = range(1, 1 + min(2, len(os.sched_getaffinity(0))))  # as many as run side by side
        began = [tmp_path / "a" / f"seed{seed}" / "metrics.jsonl" for seed in first]
        command.wait_until(lambda: all(each.exists() and each.stat().st_size for each in began))
        for pid in [command.process.pid] if signum == signal.SIGINT else command.pids():
            with contextlib.suppress(ProcessLookupError):  # SIGTERM comes to every process of a job
                os.kill(pid, signum)
        assert command.process.wait(60) == 128 + signum
        assert_nothing_left(command)
    error = command.stderr.read_text()
    assert "the same command with --run-dir a continues" in error and "Traceback" not in error
    steps = [load_run(each.parent)[1]["progress"]["steps"] for each in began]
    assert min(steps) > 0


@pytest.mark.slow
def test_runs_end_with_the_command_that_was_killed(tmp_path: Path) -> None:
    settings = {**SETTINGS, "total_steps": 2_000_000, "compile": False, "run_dir": "a"}
    with running(["train", "ppo", *options(settings), "--seeds", "1", "2"], tmp_path) as command:
        began = [tmp_path / "a" / f"seed{seed}" / "metrics.jsonl" for seed in (1, 2)]
        command.wait_until(lambda: all(each.exists() and each.stat().st_size for each in began))
        command.kill(signal.SIGKILL)
        assert_nothing_left(command)
