"""What `env_stats` says of each environment."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeVec
from helpers.testing import CountingEnv, FaultyEnv

import rayvec

SLOW_S = 0.05


@pytest.mark.parametrize(("nodes", "workers"), [(0, 0), (0, 2), (2, 1)])
def test_each_environment_has_its_figures(make_vec: MakeVec, nodes: int, workers: int) -> None:
    fns = [partial(CountingEnv, 100), partial(CountingEnv, 100, SLOW_S), partial(FaultyEnv, "raise", "step", 2)]
    env = make_vec(fns, nodes, workers, on_env_error="restart")
    env.reset(seed=10)
    for _ in range(2):
        env.step(np.zeros(3, int))
    env.rollout(lambda obs: np.zeros(len(obs), int), 1)
    fast, slow, failing = env.env_stats()
    assert (fast.num_steps, fast.num_resets, fast.num_restarts, fast.last_error) == (3, 1, 0, "")
    assert slow.longest_step_ms >= slow.step_ms >= 1e3 * SLOW_S
    assert failing.num_restarts == 1 and "environment 2, seed 12 raised ValueError" in failing.last_error
    assert [each.node for each in (fast, failing)] == [env.topology.nodes[at].name for at in (0, -1)]
    assert failing.worker == (1 if (nodes, workers) == (0, 2) else 0)


def test_a_training_says_which_is_slow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes: Any = {"num_envs": 2, "num_steps": 8, "minibatch_size": 16, "total_steps": 16, "normalize_obs": True}
    config = rayvec.PPOConfig(**sizes, eval_episodes=0, num_nodes=0, workers_per_node=2, run_dir=tmp_path / "run")
    with caplog.at_level(logging.INFO, "rayvec"):
        rayvec.train(config, env=[CountingEnv, partial(CountingEnv, 7, SLOW_S)])
    assert "The slowest environment is 1 (node" in caplog.text
