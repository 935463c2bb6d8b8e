"""Training goes round, stops cleanly, and goes on exactly where it was."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import assert_nothing_left, running

import rayvec
from rayvec import PPOConfig, TrainConfig
from rayvec.errors import CheckpointError, ConfigError
from rayvec.evaluate import evaluate, evaluate_run, greedy_policy
from rayvec.loggers import read_metrics
from rayvec.runs import Progress, load_run, make_env, make_learner
from rayvec.train import StopOnInterrupt, _begin

TINY = {"num_envs": 4, "num_steps": 16, "minibatch_size": 32, "num_epochs": 2, "workers_per_node": 1}


def tiny(run_dir: Path, **changes: Any) -> PPOConfig:
    return PPOConfig(**{**TINY, "total_steps": 600, "eval_episodes": 6, "run_dir": run_dir, **changes})


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("inference", ["worker", "driver"])
def test_a_run_leaves_everything_in_its_directory(tmp_path: Path, inference: str) -> None:
    config = tiny(tmp_path / "runs" / "a", inference=inference)
    result = rayvec.train(config)
    assert result.run_dir == config.run_dir and result.total_steps == 640 and result.wall_s > 0
    names = {path.name for path in result.run_dir.iterdir()}
    expected = {"config.yaml", "metrics.jsonl", "checkpoint.pt", "learning_curve.png", "result.json"}
    assert expected < names
    assert [name.startswith("events.out.tfevents") for name in names - expected] == [True]
    assert TrainConfig.from_yaml((result.run_dir / "config.yaml").read_text()) == config
    assert [line["steps"] for line in read_metrics(result.run_dir / "metrics.jsonl")] == list(range(64, 641, 64))
    written = json.loads((result.run_dir / "result.json").read_text())
    assert len(written["eval_returns"]) == 6
    assert np.mean(written["eval_returns"]) == written["eval_return_mean"] == result.eval_return_mean


@pytest.mark.usefixtures("ray_cluster")
def test_evaluating_the_run_again_plays_the_same_episodes(tmp_path: Path) -> None:
    result = rayvec.train(tiny(tmp_path / "a", total_steps=64))
    again = evaluate_run(result.run_dir, num_episodes=6)
    assert again.return_mean == result.eval_return_mean
    others = evaluate_run(result.run_dir, num_episodes=6, seed=99)
    assert others.returns.tolist() != again.returns.tolist()


@pytest.mark.usefixtures("ray_cluster")
def test_evaluation_is_greedy_and_begins_where_it_says(tmp_path: Path) -> None:
    config = tiny(tmp_path / "a")
    with make_env(config) as env:
        learner = make_learner(config, env)
        policy = greedy_policy(learner.module, learner.weights())
        returns = [evaluate(env, policy, 6, seed=5, inference="worker").returns.tolist() for _ in range(2)]
        assert returns[0] == returns[1] and len(returns[0]) == 6
        assert math.isnan(evaluate(env, policy, 0, seed=5).return_mean)


@pytest.mark.usefixtures("ray_cluster")
def test_without_evaluation(tmp_path: Path) -> None:
    result = rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    assert math.isnan(result.eval_return_mean)
    assert json.loads((result.run_dir / "result.json").read_text())["eval_return_mean"] is None


@pytest.mark.usefixtures("ray_cluster")
def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        rayvec.train(tiny(tmp_path / name, seed=seed, eval_episodes=0))
        weights.append(load_run(tmp_path / name)[1]["learner"]["parameters"])
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match=r"which exists.*Remedy: Pass another run_dir.*--resume"):
        rayvec.train(tiny(tmp_path / "a"))
    assert not list((tmp_path / "a").iterdir())


def test_a_run_that_cannot_begin_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Got: .*NoSuchEnvironment-v0.*Remedy"):
        rayvec.train(tiny(tmp_path / "runs" / "a", env_id="NoSuchEnvironment-v0"))
    assert not (tmp_path / "runs").exists()


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml.*No such file.*Remedy"):
        rayvec.resume(tmp_path)
    (tmp_path / "config.yaml").write_text(PPOConfig().to_yaml())
    with pytest.raises(CheckpointError, match="Got: none"):
        rayvec.resume(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 half a")
    with pytest.raises(CheckpointError, match="truncated"):
        rayvec.resume(tmp_path)


def test_the_first_ctrl_c_is_a_request_and_the_second_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_run_goes_on_exactly_where_its_checkpoint_was(tmp_path: Path) -> None:
    run_dir = tmp_path / "a"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    more = ["--total-steps=40000", "--checkpoint-interval-s=0", "--eval-episodes=6", f"--run-dir={run_dir}"]
    with running(["train", "ppo", *options, *more], tmp_path) as command:
        metrics = run_dir / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(list(read_metrics(metrics))) >= 20)
        assert command.kill(signal.SIGKILL) == -signal.SIGKILL
        assert_nothing_left(command)

    config, state = load_run(run_dir)
    steps = state["progress"]["steps"]
    assert 19 * 64 <= steps < 40_000
    assert state["learner"]["num_updates"] == state["progress"]["iterations"] == steps / 64
    with make_env(config) as env:
        learner = make_learner(config, env)
        collector = _begin(config, env, learner, Progress(**state["progress"]), state)
        assert_same(learner.state_dict(), state["learner"])
        assert_same(collector.state_dict(), state["collector"])
        assert np.array_equal(learner.weights(), state["learner"]["parameters"].numpy())

    shorter = config.to_yaml().replace("total_steps: 40000", f"total_steps: {steps + 640}")
    (run_dir / "config.yaml").write_text(shorter)
    twin = Path(shutil.copytree(run_dir, tmp_path / "twin"))
    result = rayvec.resume(run_dir)
    assert result.total_steps == steps + 640 and result.wall_s > state["progress"]["wall_s"]
    lines = list(read_metrics(metrics))
    assert [line["steps"] for line in lines] == list(range(64, steps + 641, 64))
    last = load_run(run_dir)[1]
    assert last["learner"]["num_updates"] == last["progress"]["iterations"] == steps // 64 + 10
    rayvec.resume(twin)
    assert_same(load_run(twin)[1]["learner"], last["learner"])


@pytest.mark.usefixtures("ray_cluster")
def test_resuming_a_finished_run_only_evaluates(tmp_path: Path) -> None:
    first = rayvec.train(tiny(tmp_path / "a", total_steps=64))
    again = rayvec.resume(tmp_path / "a")
    assert (again.total_steps, again.eval_return_mean) == (first.total_steps, first.eval_return_mean)
    assert [line["steps"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl")] == [64]


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_killed_half_way_still_learns(tmp_path: Path) -> None:
    run_dir = tmp_path / "a"
    arguments = ["train", "ppo", "--seed=3", "--total-steps=60000", "--checkpoint-interval-s=0.5"]
    with running([*arguments, f"--run-dir={run_dir}"], tmp_path) as command:
        metrics = run_dir / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(list(read_metrics(metrics))) >= 30)
        command.kill(signal.SIGKILL)
        assert_nothing_left(command)
    assert rayvec.resume(run_dir).eval_return_mean >= 475


def test_ctrl_c_saves_says_how_to_go_on_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "a"
    arguments = ["train", "ppo", "--total-steps", "10_000_000", "--run-dir", str(run_dir)]
    with running(arguments, tmp_path) as command:
        metrics = run_dir / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(list(read_metrics(metrics))) >= 3)
        assert command.interrupt() == 130
        assert_nothing_left(command)
    error = command.stderr.read_text()
    assert f"go on with: rayvec train ppo --resume {run_dir}" in error and "Traceback" not in error
    state = load_run(run_dir)[1]
    assert state["progress"]["steps"] == list(read_metrics(metrics))[-1]["steps"] >= 3 * 1024
    assert (run_dir / "learning_curve.png").stat().st_size > 0
