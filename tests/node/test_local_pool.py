"""Environments in the driver's own process: what is other than on Ray, and what must not be.

That all answers and chunks are those of a cluster is shown where topologies are compared (test_vector, test_rollout).
"""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from conftest import MakeVec
from helpers.exact import SpaceEnv
from helpers.testing import CountingEnv, assert_identical

import rayvec
from rayvec.errors import ConfigError
from rayvec.training.run_dir import load_run
from rayvec.vector.ray_vec_env import RayVecEnv


class Interrupts(CountingEnv):
    """Raises what Ctrl-C does."""

    def step(self, action: Any) -> Any:
        if action:
            raise KeyboardInterrupt
        return super().step(action)


def make(env: Any, **kwargs: Any) -> RayVecEnv:
    return RayVecEnv(env, num_nodes=0, workers_per_node=0, **kwargs)


def test_it_needs_no_ray_and_starts_no_process() -> None:
    code = (
        "import os, sys, rayvec\n"
        "env = rayvec.RayVecEnv('CartPole-v1', 3, num_nodes=0, workers_per_node=0)\n"
        "env.reset(seed=0)\n"
        "chunk = env.rollout(lambda obs: (obs[:, 2] > 0).astype(int), 50)\n"
        "assert chunk.valid.all() and env.worker_pids() == {'localhost/driver': [os.getpid()]}\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "print([children, 'ray' in sys.modules])\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert said.startswith("['', False]")


@pytest.mark.parametrize("settings", [{"step_timeout_s": 1.0}, {"address": "auto"}], ids=str)
def test_what_has_no_meaning_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}=.*(num_nodes|workers_per_node)=0"):
        make([CountingEnv], **settings)


def test_ctrl_c_in_a_chunk_closes_all_since_half_of_it_is_lost() -> None:
    env = make([Interrupts] * 2)
    env.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        env.rollout(lambda obs: (obs[:, 3] == 3).astype(int), 5)
    assert env.closed


def test_a_run_learns_what_it_learns_in_a_worker(tmp_path: Path) -> None:
    """Bit for bit: the same rows go through the same nets, with prefetching too."""
    weights, returns = [], []
    for workers in (0, 1):
        run_dir = tmp_path / f"{workers}"
        config = rayvec.IMPALAConfig(
            env_id="CartPole-v1", num_envs=4, num_steps=16, total_steps=256, eval_episodes=4, run_dir=run_dir,
            num_nodes=0, workers_per_node=workers,
        )  # fmt: skip
        returns.append(rayvec.train(config).eval_return_mean)
        weights.append(load_run(run_dir)[1]["weights"])
    assert torch.equal(*weights) and returns[0] == returns[1]


@pytest.mark.parametrize("nodes", [0, 1])
def test_objects_are_copies(make_vec: MakeVec, nodes: int) -> None:
    """Who changes what was returned changes neither what is returned later nor the next chunk."""
    make_env = partial(SpaceEnv, gymnasium.spaces.Graph(gymnasium.spaces.Box(0, 1, (2,)), None))
    env = make_vec([make_env] * 2, nodes, nodes)
    obs, _ = env.reset(seed=0)
    before = deepcopy(obs)
    obs[0].nodes[:] = 9
    again, _ = env.reset(options={"reset_mask": np.array([False, True])})
    assert_identical(again[0], before[0])
    chunk = env.rollout(lambda obs: np.zeros(2, int), 3)
    last = deepcopy(chunk.last_obs[0])
    chunk.last_obs[0].nodes[:] = 9
    assert_identical(env.rollout(lambda obs: np.zeros(2, int), 1).obs[0, 0], last)
