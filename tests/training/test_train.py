"""Training goes round, stops cleanly, and goes on exactly where it was."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from helpers.processes import assert_nothing_left, running
from helpers.ranks_kit import FallingLearner

import rayvec
from rayvec import PPOConfig, TrainConfig
from rayvec.collect.collector import Collector
from rayvec.data import Batch
from rayvec.errors import CheckpointError, ConfigError
from rayvec.training.evaluation import evaluate, evaluate_run, greedy_policy
from rayvec.training.loggers import read_metrics
from rayvec.training.loop import StopOnInterrupt, _begin
from rayvec.training.runs import (
    LEARNERS,
    Progress,
    begin_run_dir,
    load_run,
    locked,
    make_env,
    make_learner,
    save_checkpoint,
)

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


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("where", [{"num_learners": 3}, {"learners_apart": True, "num_learners": 2}], ids=str)
def test_ranks_learn_what_one_learner_does(tmp_path: Path, where: dict[str, Any]) -> None:
    """Also from chunks that stay in the object store, and with a run that changes hands half-way."""
    settings = {"seed": 5, "eval_episodes": 4, "num_nodes": 1, "normalize_reward": True, "normalize_obs": True}
    alone = rayvec.train(tiny(tmp_path / "alone", **settings, total_steps=256))
    ranks = rayvec.train(tiny(tmp_path / "ranks", **settings, **where, total_steps=256))
    weights = [load_run(result.run_dir)[1]["weights"] for result in (alone, ranks)]
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0)
    assert evaluate_run(ranks.run_dir, num_episodes=4).return_mean == ranks.eval_return_mean
    longer = (tmp_path / "ranks" / "config.yaml").read_text().replace("total_steps: 256", "total_steps: 320")
    (tmp_path / "ranks" / "config.yaml").write_text(longer)
    assert rayvec.resume(ranks.run_dir, num_learners=1, learners_apart=False).total_steps == 320


def make_falling(observation_space: Any, action_space: Any, config: PPOConfig) -> FallingLearner:
    learner = FallingLearner(observation_space, action_space, config)
    learner.mark, learner.who, learner.how = config.run_dir.parent / "fallen", 1, "SIGKILL"
    return learner


@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_is_killed_in_an_update_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"seed": 5, "num_nodes": 1, "num_learners": 2, "minibatch_size": 16, "total_steps": 256}
    undisturbed = rayvec.train(tiny(tmp_path / "undisturbed", **settings))
    monkeypatch.setitem(LEARNERS, PPOConfig, make_falling)
    result = rayvec.train(tiny(tmp_path / "killed", **settings))
    assert (tmp_path / "fallen").exists() and result.total_steps == 256
    weights = [load_run(run.run_dir)[1]["weights"] for run in (undisturbed, result)]
    assert torch.equal(*weights)
    assert result.eval_return_mean == undisturbed.eval_return_mean


@pytest.mark.usefixtures("ray_cluster")
def test_impala_learns_from_steps_of_older_weights(tmp_path: Path) -> None:
    """On ranks it does what one learner does, and a run goes on where it was."""
    settings = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "seed": 5, "eval_episodes": 4, "num_nodes": 1}
    runs = [
        rayvec.train(rayvec.IMPALAConfig(run_dir=tmp_path / name, total_steps=256, **settings, **where))
        for name, where in (("alone", {}), ("ranks", {"num_learners": 2}))
    ]
    weights = [load_run(run.run_dir)[1]["weights"] for run in runs]
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0)
    metrics = list(read_metrics(runs[0].run_dir / "metrics.jsonl"))
    assert [line["staleness"] for line in metrics] == [0, 1, 1, 1]
    assert metrics[0]["learner/importance_weight"] == pytest.approx(1, abs=0.01)
    longer = (runs[1].run_dir / "config.yaml").read_text().replace("total_steps: 256", "total_steps: 320")
    (runs[1].run_dir / "config.yaml").write_text(longer)
    assert rayvec.resume(runs[1].run_dir).total_steps == 320


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("inference", "staleness", "in_flight"),
    [("worker", [0, 1, 1], [True, True, False]), ("driver", [0, 0, 0], [False, False, False])],
)
def test_a_run_takes_no_chunk_that_nobody_learns_from(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inference: Literal["worker", "driver"],
    staleness: list[int],
    in_flight: list[bool],
) -> None:
    """Where the driver acts, none is taken ahead at all."""
    seen = []

    class Watched(Collector):
        def collect(self, *args: Any, **kwargs: Any) -> Batch:
            batch = super().collect(*args, **kwargs)
            seen.append(bool(self._pipeline.pending))
            return batch

    monkeypatch.setattr(sys.modules["rayvec.training.loop"], "Collector", Watched)
    settings = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "eval_episodes": 0, "workers_per_node": 1}
    run = rayvec.train(rayvec.IMPALAConfig(run_dir=tmp_path / "a", total_steps=150, inference=inference, **settings))
    assert run.total_steps == 192 and seen == in_flight
    assert [line["staleness"] for line in read_metrics(run.run_dir / "metrics.jsonl")] == staleness


@pytest.mark.usefixtures("ray_cluster")
def test_wrappers_wrap_in_order_and_returns_stay_raw(tmp_path: Path) -> None:
    plain = rayvec.train(tiny(tmp_path / "a", total_steps=64, normalize_reward=True, clip_reward=0.1))
    doubled = rayvec.train(
        tiny(tmp_path / "b", total_steps=64, wrappers=("helpers.wrap:doubled", "helpers.wrap:doubled"))
    )
    first, fourfold = (next(read_metrics(result.run_dir / "metrics.jsonl")) for result in (plain, doubled))
    assert fourfold["return_mean"] == 4 * first["return_mean"] > 10


@pytest.mark.usefixtures("ray_cluster")
def test_one_process_at_a_time_trains_in_a_directory(tmp_path: Path) -> None:
    run_dir = rayvec.train(tiny(tmp_path / "a", total_steps=64)).run_dir
    with locked(run_dir), pytest.raises(ConfigError, match=r"One process at a time.*Remedy: Wait"):
        rayvec.resume(run_dir)
    rayvec.resume(run_dir)


def test_a_run_directory_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is there until the first checkpoint is; what came into being meanwhile is left alone."""
    seen = []

    def save(directory: Path, state: dict[str, Any]) -> None:
        seen.append((tmp_path / "a").exists())
        save_checkpoint(directory, state)
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "theirs").touch()

    monkeypatch.setattr("rayvec.training.runs.save_checkpoint", save)
    begin_run_dir(tmp_path / "a", tiny(tmp_path / "a"), {"weights": torch.zeros(1)})
    assert seen == [False] and {path.name for path in (tmp_path / "a").iterdir()} == {"config.yaml", "checkpoint.pt"}
    with pytest.raises(ConfigError, match=r"b, which exists"):
        begin_run_dir(tmp_path / "b", tiny(tmp_path / "b"), {"weights": torch.zeros(1)})
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.parametrize("lost", ["learner", "collector", "progress", "weights"])
def test_a_checkpoint_that_lacks_something_is_refused(tmp_path: Path, lost: str) -> None:
    state = {"weights": torch.zeros(1), "learner": {}, "collector": {}, "progress": asdict(Progress())}
    begin_run_dir(tmp_path / "a", tiny(tmp_path / "a"), {name: part for name, part in state.items() if name != lost})
    with pytest.raises(CheckpointError, match=rf"holds everything.*no {lost}.*Remedy"):
        load_run(tmp_path / "a")


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("part", ["learner", "collector"])
def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path, part: str) -> None:
    run_dir = rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0)).run_dir
    state = load_run(run_dir)[1]
    save_checkpoint(run_dir, {**state, part: {"something": 1}})
    with pytest.raises(CheckpointError, match=r"Expected: .*Got: .*something|first_step|noise_seed"):
        rayvec.resume(run_dir)


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


STUCK = """
import time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Stuck(CartPoleEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        while self.steps > 60:
            time.sleep(1)
        return super().step(action)

gymnasium.register("Stuck-v0", Stuck)
"""


def test_the_second_ctrl_c_waits_for_no_environment(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    run_dir = tmp_path / "a"
    arguments = ["train", "impala", "--env-id=stuck:Stuck-v0", "--num-steps=50", f"--run-dir={run_dir}"]
    with running(arguments, tmp_path) as command:
        metrics = run_dir / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(list(read_metrics(metrics))) == 1)
        command.process.send_signal(signal.SIGINT)
        command.wait_until(lambda: "Ctrl-C again" in command.stderr.read_text())
        assert command.interrupt() == 130
        assert_nothing_left(command)
    assert command.stderr.read_text().endswith(
        f"\nrayvec: interrupted\ngo on with: rayvec train impala --resume {run_dir}\n"
    )
    # What was there before, or what the first Ctrl-C has saved if it came before the next chunk was waited for.
    assert load_run(run_dir)[1]["progress"]["steps"] in (0, 800)
