"""A run begins with the network of another run, and with nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_kit import HERE, tiny

import rayvec
from rayvec.errors import CheckpointError, ConfigError
from rayvec.training import loop
from rayvec.training.run_dir import load_run

RANKS = {"learners": "decentralized", "num_learners": 2, "sync_fraction": 1.0}
COMMON: dict[str, Any] = {"num_envs": 4, **HERE, "eval_episodes": 0}
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (rayvec.PPOConfig, {"num_steps": 16, "minibatch_size": 32, "normalize_obs": True, "total_steps": 192}),
    (rayvec.IMPALAConfig, {"num_steps": 16, "num_minibatches": 2, "total_steps": 192}),
    (rayvec.SACConfig, {"num_steps": 8, "learning_starts": 64, "batch_size": 16, "total_steps": 192}),
]


class First:
    """Stops a run after its first iteration and notes the weights before it."""

    def on_iteration(self, context: rayvec.RunContext) -> None:
        context.stop("one is enough")


@pytest.mark.parametrize("where", [{}, pytest.param(RANKS, marks=pytest.mark.slow)], ids=["one process", "ranks"])
@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=lambda value: getattr(value, "algorithm", ""))
def test_a_run_begins_with_the_weights_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, settings: dict[str, Any], where: dict[str, Any]
) -> None:
    begun: list[dict[str, Any]] = []
    begin = loop.begin_run_dir
    monkeypatch.setattr("rayvec.training.loop.begin_run_dir", lambda *args: (begun.append(args[2]), begin(*args)))
    first = rayvec.train(kind(run_dir=tmp_path / "a", **COMMON, **settings))
    changes = {"seed": 9, "init_from": first.run_dir, **where}
    rayvec.train(kind(run_dir=tmp_path / "b", **COMMON, **{**settings, **changes}), callbacks=[First()])
    source = load_run(first.run_dir)[1]
    assert torch.equal(begun[1]["weights"], source["weights"]) and not torch.equal(
        begun[0]["weights"], source["weights"]
    )
    learner = begun[1]["learner"]
    assert learner["num_updates"] == learner.get("num_steps", 0) == begun[1]["progress"]["steps"] == 0
    if kind is rayvec.SACConfig:
        assert torch.equal(learner["target"], source["learner"]["target"])
        assert torch.equal(learner["critic"], source["learner"]["critic"])
        assert not any(part.any() for optimizer in learner["optimizers"].values() for part in optimizer.values())
    else:
        assert learner["obs_moments"].keys() == source["learner"]["obs_moments"].keys()


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
