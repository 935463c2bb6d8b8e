"""Decentralized ranks learn what one process learns, and a run survives what happens to them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest
import torch
from helpers.own_envs import Line, Masked
from helpers.own_parts import two_heads
from helpers.processes import Command, assert_nothing_left, running
from helpers.training_kit import HERE, SMALL, lengthen, lines_of, options

import rayvec
from rayvec.training.evaluation import evaluate_run
from rayvec.training.run_dir import load_run, read_metrics

pytestmark = pytest.mark.timeout(600)

UNCUT: dict[str, Any] = {"learners": "decentralized", "sync_fraction": 1.0}
COMMON: dict[str, Any] = {"num_envs": 8, "eval_episodes": 5, "seed": 5, **HERE}
PPO = {**COMMON, "num_steps": 16, "total_steps": 640, "minibatch_size": 32, "normalize_obs": True}
IMPALA = {**COMMON, "num_steps": 16, "total_steps": 640, "num_minibatches": 2}
SAC = {**COMMON, "num_steps": 8, "total_steps": 320, "learning_starts": 200, "batch_size": 32, "inference": "driver"}
MEMORY = {"recurrent_size": 8, "hidden_sizes": (8,), "sequence_length": 6}
NATIVE = {"normalize_obs": False, "native": "helpers.native_envs:cartpoles"}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "ppo": (rayvec.PPOConfig, {**PPO, "eval_interval_steps": 256}, {}),
    "impala": (rayvec.IMPALAConfig, IMPALA, {}),
    "sac": (rayvec.SACConfig, SAC, {}),
    "ppo with memory": (rayvec.PPOConfig, {**PPO, **MEMORY, "recurrent": "gru"}, {}),
    "impala with memory": (rayvec.IMPALAConfig, {**IMPALA, **MEMORY, "recurrent": "lstm"}, {}),
    "native ppo": (rayvec.PPOConfig, {**PPO, **NATIVE}, {}),
    "native sac": (rayvec.SACConfig, {**SAC, "native": "helpers.native_envs:pendulums", "num_steps": 10}, {}),
    "masks": (rayvec.PPOConfig, {**PPO, "normalize_obs": False}, {"env": lambda: Masked("obs")}),
    "own parts": (rayvec.PPOConfig, {**PPO, "normalize_obs": False}, {"env": Line, "network": two_heads}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (number > 2)) for number, name in enumerate(CASES)]
)
def test_ranks_learn_what_one_process_learns(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Three ranks have 2, 3 and 3 of the environments."""
    kind, settings, parts = CASES[case]
    uncut = {"prefetch": False} if kind is rayvec.IMPALAConfig else {}
    alone = rayvec.train(kind(run_dir=tmp_path / "alone", **settings, **uncut), **parts)
    ranks = rayvec.train(kind(run_dir=tmp_path / "ranks", **settings, **UNCUT, num_learners=3), **parts)
    assert "rayvec: 8 environments on this machine, without Ray: 3 ranks" in capsys.readouterr().err
    (_, one), (_, three) = (load_run(result.run_dir) for result in (alone, ranks))
    torch.testing.assert_close(three["weights"], one["weights"], atol=5e-6, rtol=0)  # Adam divides by small gradients
    assert three["collector"] == one["collector"]
    assert ranks.total_steps == alone.total_steps and three["progress"]["episodes"] == one["progress"]["episodes"]
    assert ranks.eval_return_mean == pytest.approx(alone.eval_return_mean)
    lines, expected = (list(read_metrics(run.run_dir / "metrics.jsonl")) for run in (ranks, alone))
    assert [line["ranks_cut"] for line in lines] == [0] * len(lines) and lines[0]["time_s/wait"] >= 0
    played = [[line["eval/return_mean"] for line in each if "eval/return_mean" in line] for each in (lines, expected)]
    assert played[0] == pytest.approx(played[1]) and len(played[0]) == 2 * ("eval_interval_steps" in settings)
    assert evaluate_run(ranks.run_dir, num_episodes=5, **parts).return_mean == pytest.approx(ranks.eval_return_mean)


@pytest.mark.slow
def test_the_replay_of_each_rank_outlives_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = rayvec.train(rayvec.SACConfig(run_dir=tmp_path / "a", **SAC, **UNCUT, num_learners=2))
    lengthen(run.run_dir, 320, 384)
    rayvec.resume(run.run_dir)
    assert list(read_metrics(run.run_dir / "metrics.jsonl"))[-1]["learner/replay_steps"] == 384
    lengthen(run.run_dir, 384, 448)
    with caplog.at_level(logging.WARNING):
        rayvec.resume(run.run_dir, num_learners=1, learners=None)
    assert load_run(run.run_dir)[1]["progress"]["steps"] == 448


class Registered(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that only the driver registers."""


def test_ranks_know_what_the_driver_has_registered(tmp_path: Path) -> None:
    gymnasium.register("OfTheDriver-v0", lambda: Registered(gymnasium.make("CartPole-v1")))
    try:
        config = rayvec.PPOConfig(
            **{**SMALL, **HERE, **UNCUT, "env_id": "OfTheDriver-v0", "total_steps": 64},
            num_learners=2,
            hidden_sizes=(512, 512),  # whose state does not fit into the buffer of a pipe
            eval_episodes=0,
            run_dir=tmp_path / "a",
        )
        assert rayvec.train(config).total_steps == 64
    finally:
        del gymnasium.registry["OfTheDriver-v0"]


def test_ranks_divide_a_list_of_environments(tmp_path: Path) -> None:
    """The number of workers is the default one."""
    settings = {**SMALL, **UNCUT, "num_envs": 4, "num_learners": 2, "num_nodes": 0, "total_steps": 64}
    config = rayvec.PPOConfig(**settings, eval_episodes=0, run_dir=tmp_path / "a")
    makes = [lambda: gymnasium.make("CartPole-v1")] * 4
    assert rayvec.train(config, env=makes).total_steps == 64


def test_no_iteration_is_left_out_of_the_last_checkpoint(tmp_path: Path) -> None:
    """With variable lengths an iteration takes more steps than planned, and one has begun beyond the last."""
    settings = {**SMALL, "num_nodes": 0, "workers_per_node": 2, "total_steps": 640, "eval_episodes": 0}
    config = rayvec.PPOConfig(
        **settings, learners="decentralized", variable_lengths=True, checkpoint_interval_s=1e9, run_dir=tmp_path / "a"
    )
    rayvec.train(config)
    state = load_run(tmp_path / "a")[1]
    assert (
        state["learner"]["num_updates"] == state["progress"]["iterations"] == lines_of(tmp_path / "a" / "metrics.jsonl")
    )
    assert state["learner"]["num_steps"] == state["progress"]["steps"] >= 640


def ranks_of(command: Command) -> list[psutil.Process]:
    """Returns the processes of the ranks that a command has started."""
    return [psutil.Process(pid) for pid in sorted(command.pids()) if psutil.Process(pid).name() == "rayvec-rank"]


@pytest.mark.parametrize(
    ("lost", "learners"), [(0, "shared"), *(pytest.param(n, "decentralized", marks=pytest.mark.slow) for n in (0, 1))]
)
def test_a_run_that_lost_a_rank_takes_all_its_steps(tmp_path: Path, lost: int, learners: str) -> None:
    run_dir = tmp_path / "a"
    settings = {**SMALL, **UNCUT, "num_learners": 2, "total_steps": 6400, "eval_episodes": 2, "run_dir": run_dir}
    settings["learners"] = learners
    with running(["train", "ppo", *options({**settings, **HERE}), "--checkpoint-interval-s=0.5"], tmp_path) as command:
        command.wait_until(lambda: lines_of(run_dir / "metrics.jsonl") >= 5)
        os.kill(ranks_of(command)[lost].pid, signal.SIGKILL)
        assert command.process.wait(300) == 0, command.stderr.read_text()
        assert_nothing_left(command)
    assert "restarting all ranks at step" in command.stderr.read_text()
    assert [line["steps"] for line in read_metrics(run_dir / "metrics.jsonl")] == list(range(64, 6401, 64))
    assert load_run(run_dir)[1]["learner"]["num_updates"] == 100


class Tires(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Each instance raises in its 40th step."""

    num_steps = 0

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        if self.num_steps == 40:
            raise ValueError("tired")
        return super().step(action)


def tires() -> gymnasium.Env[Any, Any]:
    return Tires(gymnasium.make("CartPole-v1"))


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "places",
    [
        pytest.param(HERE, id="here"),
        pytest.param({"num_nodes": 2, "workers_per_node": 1}, marks=pytest.mark.slow, id="on nodes"),
    ],
)
def test_what_ranks_log_is_logged_by_the_driver(
    tmp_path: Path, places: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the rank, so that each fault has a line there. Environments take fewer than 80 steps."""
    config = rayvec.PPOConfig(
        **{**SMALL, **UNCUT, **places},
        num_learners=2,
        total_steps=192,
        eval_episodes=0,
        on_env_error="restart",
        run_dir=tmp_path / "a",
    )
    rayvec.train(config, env=tires)
    said = sorted(line for line in caplog.messages if "tired" in line)
    assert len(said) == 4, caplog.messages
    for number, line in enumerate(said):
        assert line.startswith(f"rank {number // 2} on ") and f"environment {number}, seed " in line, line
        assert "localhost/driver" not in line and "the driver's process" not in line, line


@pytest.mark.usefixtures("ray_cluster")
def test_ranks_on_two_nodes_learn_what_one_process_learns(tmp_path: Path) -> None:
    alone = rayvec.train(rayvec.PPOConfig(run_dir=tmp_path / "alone", **PPO))
    on_nodes = {**PPO, **UNCUT, "num_learners": 2, "num_nodes": 2, "workers_per_node": 1}
    ranks = rayvec.train(rayvec.PPOConfig(run_dir=tmp_path / "ranks", **on_nodes))
    weights = [load_run(result.run_dir)[1]["weights"] for result in (alone, ranks)]
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)
    assert ranks.eval_return_mean == pytest.approx(alone.eval_return_mean)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("what", ["rank", "node"])
def test_a_run_outlives_a_rank_or_a_node_of_the_cluster(
    tmp_path: Path, ray_cluster: Any, what: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three ranks on three nodes; the others have room for them without one node."""
    extra = ray_cluster.add_node(num_cpus=1, resources={"extra": 1})
    run_dir, removed = tmp_path / "a", threading.Event()
    settings = {**SMALL, **UNCUT, "num_learners": 3, "num_nodes": 3, "workers_per_node": 1, "total_steps": 12_800}

    def strike() -> None:
        while lines_of(run_dir / "metrics.jsonl") < 5:
            time.sleep(0.05)
        if what == "node":
            ray_cluster.remove_node(extra, allow_graceful=False)
        else:
            ours = psutil.Process().children(recursive=True)
            next(each for each in ours if each.cmdline()[:1] and "ray::Rank" in each.cmdline()[0]).kill()
        removed.set()

    threading.Thread(target=strike, daemon=True).start()
    config = rayvec.PPOConfig(**settings, run_dir=run_dir, eval_episodes=0, checkpoint_interval_s=0.5)
    try:
        with caplog.at_level(logging.WARNING):
            assert rayvec.train(config).total_steps == 12_800
    finally:
        assert removed.wait(60)
        if what == "rank":
            ray_cluster.remove_node(extra)
    assert "restarting all ranks at step" in caplog.text
    steps = [line["steps"] for line in read_metrics(run_dir / "metrics.jsonl")]
    assert steps == list(range(64, 12_801, 64))
    begun = [line for line in capsys.readouterr().err.splitlines() if "3 ranks" in line]
    assert ["(nodes: 3)" in line for line in begun] == [True, what == "rank"]
