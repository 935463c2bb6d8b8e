"""A run that is resumed in mid-episode equals the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from helpers.own_envs import Lock
from helpers.training_kit import StopsAt, assert_same, tiny

import rayvec
from rayvec.training.run_dir import load_run, read_metrics
from rayvec.wrappers import SaveState

SAVES = {"wrappers": ("rayvec.wrappers:SaveState",), "eval_episodes": 2}
CARTPOLE = {"env_id": "CartPole-v1", "env_kwargs": {"max_episode_steps": 41}, "total_steps": 512}
CHEETAH = {"env_id": "HalfCheetah-v5", "env_kwargs": {"max_episode_steps": 45}, "total_steps": 384}


def outcome(run_dir: Path) -> Any:
    """Returns what a run has learned, how its episodes are, and its metrics without times."""
    state = load_run(run_dir)[1]
    progress = {name: value for name, value in state.pop("progress").items() if name != "wall_s"}
    lines = [
        {name: value for name, value in line.items() if not name.startswith(("time", "wall", "steps_per_s"))}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]
    return state, repr((progress, lines))  # as NaN is not equal to itself


@pytest.mark.parametrize(
    "settings",
    [
        {**CARTPOLE, "workers_per_node": 0},
        {**CHEETAH, "workers_per_node": 2},
        {**CARTPOLE, "workers_per_node": None, "learners": "decentralized", "num_learners": 2, "sync_fraction": 1},
    ],
    ids=["CartPole", "HalfCheetah in workers", "ranks"],
)
def test_a_run_that_is_resumed_equals_one_that_was_not_interrupted(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = rayvec.train(tiny(tmp_path / "whole", **SAVES, **settings))
    rayvec.train(tiny(tmp_path / "parts", **SAVES, **settings), callbacks=[StopsAt(3)])
    parts = rayvec.resume(tmp_path / "parts")
    assert parts.eval_return_mean == whole.eval_return_mean
    assert_same(outcome(tmp_path / "parts"), outcome(tmp_path / "whole"))


def test_with_a_memory_a_resumed_run_begins_new_episodes(tmp_path: Path) -> None:
    settings = {**CARTPOLE, **SAVES, "recurrent": "gru", "sequence_length": 4, "total_steps": 64}
    run_dir = rayvec.train(tiny(tmp_path / "a", **settings)).run_dir
    assert load_run(run_dir)[1]["collector"]["envs"] is None
    assert rayvec.resume(run_dir, total_steps=128).total_steps == 128


def test_without_a_state_that_can_be_saved_a_resumed_run_begins_new_episodes(tmp_path: Path) -> None:
    def env() -> Any:
        return Lock(SaveState(gymnasium.make("CartPole-v1")))

    with pytest.warns(UserWarning, match="begins new episodes. TypeError: The state of Lock can't be saved"):
        run = rayvec.train(tiny(tmp_path / "a", total_steps=128, eval_episodes=0), env=env)
    assert load_run(run.run_dir)[1]["collector"]["envs"] is None
    with pytest.warns(UserWarning, match="begins new episodes"):
        assert rayvec.resume(run.run_dir, env=env, total_steps=256).total_steps == 256
