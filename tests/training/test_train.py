"""A run leaves its files, learns the same from the same seed, begins with another's network; and its whole life."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
import torch
from helpers.processes import assert_nothing_left, running
from helpers.training_kit import HERE, StopsAt, assert_same, lengthen, lines_of, options, tiny

import rayvec
from rayvec import PPOConfig, TrainConfig
from rayvec.cli import main
from rayvec.config import CONFIGS
from rayvec.errors import CheckpointError, ConfigError
from rayvec.training.evaluation import evaluate_run
from rayvec.training.run_dir import load_run, read_metrics

IMPALA = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2}
ONE_WORKER = {"num_nodes": 1, "workers_per_node": 1}


@pytest.mark.parametrize("inference", ["worker", "driver", "node"])
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
    assert evaluate_run(result.run_dir, num_episodes=6).returns.tolist() == written["eval_returns"]
    assert evaluate_run(result.run_dir, num_episodes=6, seed=99).returns.tolist() != written["eval_returns"]


@pytest.mark.parametrize(
    ("inference", "staleness"), [("worker", [0, 1, 1]), ("driver", [0, 0, 0]), ("node", [0, 0, 0])]
)
def test_chunks_are_taken_ahead_where_workers_act(
    tmp_path: Path, inference: Literal["worker", "driver", "node"], staleness: list[int]
) -> None:
    settings = {**IMPALA, **HERE, "total_steps": 150, "eval_episodes": 0}
    run = rayvec.train(rayvec.IMPALAConfig(run_dir=tmp_path / "a", inference=inference, **settings))
    assert run.total_steps == 192
    assert [line["staleness"] for line in read_metrics(run.run_dir / "metrics.jsonl")] == staleness


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "where",
    [pytest.param({"num_learners": 3}, marks=pytest.mark.slow), {"learners": "dedicated", "num_learners": 2}],
    ids=str,
)
def test_ranks_learn_what_one_learner_does(tmp_path: Path, where: dict[str, Any]) -> None:
    """Also from chunks that stay in the object store, and in a run that is resumed with one learner."""
    settings = {"seed": 5, "eval_episodes": 4, "normalize_reward": True, "normalize_obs": True, "total_steps": 256}
    alone = rayvec.train(tiny(tmp_path / "alone", **settings))
    ranks = rayvec.train(tiny(tmp_path / "ranks", **settings, **where, **ONE_WORKER))
    weights = [load_run(result.run_dir)[1]["weights"] for result in (alone, ranks)]
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0)
    assert evaluate_run(ranks.run_dir, num_episodes=4).return_mean == ranks.eval_return_mean
    lengthen(ranks.run_dir, 256, 320)
    assert rayvec.resume(ranks.run_dir, num_learners=1, learners=None).total_steps == 320


class Steered(gymnasium.Env[Any, Any]):
    """The reward is the share of the two parts of an action that are right."""

    observation_space = gymnasium.spaces.Dict(
        observation=gymnasium.spaces.Box(-1, 1, (2,), np.float32), action_mask=gymnasium.spaces.MultiBinary(3)
    )
    action_space = gymnasium.spaces.Dict(gear=gymnasium.spaces.Discrete(3), wheel=gymnasium.spaces.Box(0, 10, (1,)))

    def observe(self) -> Any:
        self.seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"observation": self.seen, "action_mask": np.array([1, 1, self.steps % 2], np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space and (action["gear"] < 2 or self.steps % 2)
        right = (action["gear"] == (self.seen[0] > 0)) + max(0.0, 1 - abs(action["wheel"][0] - 5 - 4 * self.seen[1]))
        self.steps += 1
        return self.observe(), float(right) / 2, False, self.steps == 10, {}


@pytest.mark.parametrize("kind", ["ppo", pytest.param("impala", marks=pytest.mark.slow)])
def test_hybrid_actions_are_learned(tmp_path: Path, kind: str) -> None:
    """Random actions give 3.6; the mask belongs to the choice of a gear."""
    common: dict[str, Any] = {**HERE, "num_envs": 16, "num_steps": 32, "total_steps": 40_960, "eval_episodes": 8}
    common |= {"run_dir": tmp_path / "a", "learning_rate": 3e-3, "entropy_coef": 0.0, "gamma": 0.0}
    config = PPOConfig(**common) if kind == "ppo" else rayvec.IMPALAConfig(**common)
    assert rayvec.train(config, env=Steered).eval_return_mean > 6.5


SMALL_RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"num_envs": 4, "num_steps": 16, "minibatch_size": 32},
    "impala": {"num_envs": 4, "num_steps": 16, "num_minibatches": 1},
    "sac": {"num_envs": 2, "num_steps": 16, "learning_starts": 64, "batch_size": 32},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "algorithm", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("impala", "sac"))]
)
def test_the_life_of_a_run(algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed, copy = tmp_path / "killed", tmp_path / "copy"
    settings = {**SMALL_RUNS[algorithm], **HERE, "total_steps": 200_000, "eval_episodes": 4, "run_dir": killed}
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
    assert action in agent.action_space
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX is an extra")
    session = onnxruntime.InferenceSession(agent.export(tmp_path / "policy.onnx"))
    (exported,) = session.run(None, {"obs": obs[None]})
    np.testing.assert_allclose(exported[0], action, atol=1e-5)


RANKS = {"learners": "decentralized", "num_learners": 2, "sync_fraction": 1.0}


@pytest.mark.parametrize("where", [{}, pytest.param(RANKS, marks=pytest.mark.slow)], ids=["one process", "ranks"])
@pytest.mark.parametrize("algorithm", SMALL_RUNS)
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path, algorithm: str, where: dict[str, Any]) -> None:
    """One that learns nothing still has them: its steps are too small, or too few for an update."""
    kind, settings = CONFIGS[algorithm], {**SMALL_RUNS[algorithm], **HERE, "eval_episodes": 0, "total_steps": 192}
    settings |= {"normalize_obs": True} if algorithm == "ppo" else {}
    first = rayvec.train(kind(run_dir=tmp_path / "a", **settings))
    changes = {"seed": 9, "init_from": first.run_dir, **where}
    changes |= {"learning_rate": 1e-12} if algorithm != "sac" else {}
    run = rayvec.train(kind(run_dir=tmp_path / "b", **{**settings, **changes}), callbacks=[StopsAt(1)])
    source, state = (load_run(each.run_dir)[1] for each in (first, run))
    assert state["progress"]["steps"] < source["progress"]["steps"]
    for name in ("actor", "critic", "target") if algorithm == "sac" else ("parameters",):
        torch.testing.assert_close(state["learner"][name], source["learner"][name], atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_sizes": (32, 32)}, "parameters"),
        pytest.param({"hidden_sizes": (32, 32), **RANKS}, "parameters", marks=pytest.mark.slow),
        ({"env_id": "Acrobot-v1"}, "observations of"),
        ({"normalize_obs": True}, "obs_mean|obs_moments"),
    ],
)
def test_weights_of_another_network(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    with pytest.raises((ConfigError, CheckpointError), match=words):
        rayvec.train(tiny(tmp_path / "b", init_from=tmp_path / "a", **changes))
    assert not (tmp_path / "b").exists()


def test_weights_of_another_algorithm_or_of_nothing(tmp_path: Path) -> None:
    rayvec.train(tiny(tmp_path / "a", total_steps=64, eval_episodes=0))
    settings = {"env_id": "CartPole-v1", "init_from": tmp_path / "a", "learning_starts": 10, "total_steps": 64, **HERE}
    with pytest.raises(ConfigError, match="same algorithm"):
        rayvec.train(rayvec.SACConfig(run_dir=tmp_path / "b", **settings))
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        rayvec.train(tiny(tmp_path / "b", init_from=tmp_path / "nowhere"))
    (tmp_path / "a" / "checkpoint.pt").unlink()
    with pytest.raises(CheckpointError):
        rayvec.train(tiny(tmp_path / "b", init_from=tmp_path / "a"))
    assert not (tmp_path / "b").exists()
