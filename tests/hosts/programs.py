"""Programs that drivers run on a host of a cluster: ``python programs.py NAME ARGUMENTS``. They print lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import ray
from gymnasium.vector import SyncVectorEnv
from helpers.chunks import assert_same_chunk
from helpers.testing import CountingEnv, assert_identical, counting_errors

import rayvec
from rayvec.errors import NodeLostError, RayvecError

NUM_ENVS = 6
PAUSE_S = 0.002
"""Between calls of a driver that goes on until it is killed, so that it leaves the cores to others."""
PLACE: dict[str, Any] = {"num_nodes": 3, "workers_per_node": 1}


def say(**values: Any) -> None:
    """Prints a line."""
    print(json.dumps({"at_s": time.monotonic(), **values}), flush=True)


def equal() -> None:
    """Does the same on all hosts and without Ray: steps, chunks, and steps by Tianshou's adapter."""
    fns = [CountingEnv] * NUM_ENVS
    sync = SyncVectorEnv(fns)
    with rayvec.RayVecEnv(fns, **PLACE) as env:
        hosts = sorted({node.address for node in env.topology.nodes})
        assert_identical(env.reset(seed=3), sync.reset(seed=3))
        for number in range(200):
            actions = np.arange(number, number + NUM_ENVS) % 2
            assert_identical(env.step(actions), sync.step(actions), f"step {number}")
    say(hosts=hosts, steps=200)
    found = []
    for place in (PLACE, {"num_nodes": 0, "workers_per_node": 0}):
        with rayvec.RayVecEnv(fns, **place) as env:
            found.append([env.rollout(_idle, 50, seed=3), env.rollout(_idle, 50)])
    for got, expected in zip(*found, strict=True):
        assert_same_chunk(got, expected)
    say(errors=counting_errors(found[0]))
    from helpers.tianshou_lockstep import in_lockstep  # which imports torch, for seconds
    from tianshou.env import DummyVectorEnv

    from rayvec.tianshou import RayVectorEnv

    with closing(RayVectorEnv(fns, **PLACE)) as ours:
        in_lockstep(ours, DummyVectorEnv(fns), 50)
    say(tianshou_steps=50)


def _idle(obs: Any) -> Any:
    return np.zeros(len(obs), int)


SMALL: dict[str, Any] = {
    "env_id": "CartPole-v1",
    "num_envs": NUM_ENVS,
    "num_steps": 32,
    "minibatch_size": 64,
    "eval_episodes": 2,
    "seed": 1,
    "workers_per_node": 1,
    "checkpoint_interval_s": 1.0,
    "compile": False,  # each restart would compile again
}


def train(run_dir: str, num_nodes: str) -> None:
    """Trains decentralized PPO with a rank on each of some hosts until it is killed, or says how it ended."""
    place = {"learners": "decentralized", "num_nodes": int(num_nodes), "num_learners": int(num_nodes)}
    config = rayvec.PPOConfig(
        **SMALL, **place, run_dir=Path(run_dir), total_steps=10**7, address=os.environ["RAY_ADDRESS"]
    )
    try:
        rayvec.train(config)
    except RayvecError as error:
        say(error=" ".join([str(error), *getattr(error, "__notes__", ())]))
        raise


def go_on(mode: str, num_nodes: str) -> None:
    """Steps until it is killed, and says what it sees."""
    chosen = {**PLACE, "num_nodes": int(num_nodes), "on_node_loss": mode, "on_env_error": "restart"}
    with rayvec.RayVecEnv([CountingEnv] * NUM_ENVS, **chosen) as env:
        env.reset(seed=3)
        number = 0
        while True:
            try:
                infos = env.step(np.zeros(NUM_ENVS, int))[-1]
            except NodeLostError as error:
                say(error=str(error))
                return
            number += 1
            time.sleep(PAUSE_S)
            restarted = np.flatnonzero(infos.get("env_restarted", ())).tolist()
            if restarted or number % 50 == 0:
                say(step=number, restarted=restarted, **_hosts(env))


def _hosts(env: rayvec.RayVecEnv) -> dict[str, list[str]]:
    """Returns the hosts that environments are on, and those that Ray takes for alive."""
    alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    return {"hosts": sorted({node.address for node in env.topology.nodes}), "alive": alive}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
