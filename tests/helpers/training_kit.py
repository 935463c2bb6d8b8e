"""Runs that take a second: settings, and a comparison of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rayvec import RunContext
from rayvec.config import PPOConfig, SACConfig
from rayvec.training.run_dir import read_metrics

HERE = {"num_nodes": 0, "workers_per_node": 0}
"""Environments are stepped in the process of the test."""

SMALL = {"num_envs": 4, "num_steps": 16, "minibatch_size": 32, "num_epochs": 2}


def tiny(run_dir: Path, **changes: Any) -> PPOConfig:
    """Settings of a small run of PPO, in this process unless `changes` say otherwise."""
    return PPOConfig(**{**SMALL, **HERE, "total_steps": 600, "eval_episodes": 6, "run_dir": run_dir, **changes})


def sac(run_dir: Path, **changes: Any) -> SACConfig:
    """Settings of a small run of SAC in iterations of 512 steps, with few updates."""
    usual: dict[str, Any] = {"num_envs": 4, "num_steps": 128, "total_steps": 2560, "learning_starts": 2500}
    usual |= {"batch_size": 16, "hidden_sizes": (8,), "env_id": "CartPole-v1", "eval_episodes": 0, "run_dir": run_dir}
    return SACConfig(**{**usual, **HERE, **changes})


class StopsAt:
    """Ends a run after some iterations."""

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations

    def on_iteration(self, context: RunContext) -> None:
        if context.progress.iterations == self._iterations:
            context.stop("the test")


def options(settings: dict[str, Any]) -> list[str]:
    """Returns settings as options of the command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def lengthen(run_dir: Path, before: int, after: int) -> None:
    """Changes the total steps of a run."""
    text = (run_dir / "config.yaml").read_text()
    assert f"total_steps: {before}\n" in text
    (run_dir / "config.yaml").write_text(text.replace(f"total_steps: {before}\n", f"total_steps: {after}\n"))


def assert_same(a: Any, b: Any) -> None:
    """Asserts that two states are equal, to the last bit."""
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


def lines_of(metrics: Path) -> int:
    """Returns how many lines of metrics a run has written."""
    return len(list(read_metrics(metrics)))
