"""Where a run's environments are stepped: on Ray if anything asks for it, else on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.own_envs import FailsOnce
from helpers.training_kit import tiny

import rayvec

DECISIONS = """
import os, sys
from rayvec import PPOConfig
from rayvec.training.runs import choose_engine
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
