"""Environments in the driver's own process: what is other than on Ray, and what must not be.

That all answers and chunks are those of a cluster is shown where topologies are compared (test_vector, test_rollout).
"""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from functools import partial

import gymnasium
import numpy as np
import pytest
from conftest import MakeVec
from helpers.exact import SpaceEnv
from helpers.testing import assert_identical


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
