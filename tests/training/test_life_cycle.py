"""The life of a run through the command line, for each algorithm: train, SIGKILL, resume, train longer, eval, load."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import assert_nothing_left, running
from helpers.training_kit import HERE, assert_same, lines_of, options

import rayvec
from rayvec.cli import main
from rayvec.training.run_dir import load_run, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"num_envs": 4, "num_steps": 16, "minibatch_size": 32},
    "impala": {"num_envs": 4, "num_steps": 16, "num_minibatches": 1},
    "sac": {"num_envs": 2, "num_steps": 16, "learning_starts": 200, "batch_size": 32},
}


@pytest.mark.parametrize("algorithm", SMALL)
def test_the_life_of_a_run(algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed, copy = tmp_path / "killed", tmp_path / "copy"
    settings = {**SMALL[algorithm], **HERE, "total_steps": 200_000, "eval_episodes": 4, "run_dir": killed}
    args = ["train", algorithm, *options(settings), "--checkpoint-interval-s=0.2"]
    with running(args, tmp_path) as command:
        command.wait_until(lambda: lines_of(killed / "metrics.jsonl") >= 5)
        assert command.kill(signal.SIGKILL) == -signal.SIGKILL
        assert_nothing_left(command)
    steps = load_run(killed)[1]["progress"]["steps"]
    shutil.copytree(killed, copy)

    total = steps + 4 * 64
    longer = ["--total-steps", str(total), "--eval-episodes", "4"]
    for run_dir in (killed, copy):  # what is resumed twice learns the same twice
        assert main(["train", "--resume", str(run_dir), *longer]) == 0
    config, state = load_run(killed)
    again = load_run(copy)[1]
    assert config.total_steps == total <= state["progress"]["steps"] < total + 64
    for part in ("weights", "learner", "collector"):
        assert_same(state[part], again[part])
    logged = [line["steps"] for line in read_metrics(killed / "metrics.jsonl")]
    assert logged == sorted(set(logged)) and logged[-1] == state["progress"]["steps"]

    assert main(["train", "--resume", str(killed), "--total-steps", str(total + 128)]) == 0, "once more"
    assert load_run(killed)[1]["progress"]["steps"] >= total + 128
    result = json.loads((killed / "result.json").read_text())
    capsys.readouterr()
    assert main(["eval", str(killed), "--episodes", "4"]) == 0
    assert f"mean return {result['eval_return_mean']:.2f}" in capsys.readouterr().out

    agent = rayvec.load(killed)
    obs = agent.observation_space.sample()
    action = agent.predict(obs)
    assert action in agent.action_space and agent.steps == result["total_steps"]
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX is an extra")
    session = onnxruntime.InferenceSession(agent.export(tmp_path / "policy.onnx"))
    (exported,) = session.run(None, {"obs": obs[None]})
    np.testing.assert_allclose(exported[0], action, atol=1e-5)
