"""Programs that drivers run on a host of a cluster: ``python programs.py NAME ARGUMENTS``. They print lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv
from helpers.chunks import assert_same_chunk

import rayvec
from rayvec.errors import NodeLostError, RayvecError
from rayvec.testing import CountingEnv, assert_identical, counting_errors

NUM_ENVS = 6
PLACE: dict[str, Any] = {"num_nodes": 3, "workers_per_node": 1}


def say(**values: Any) -> None:
    """Prints a line."""
    print(json.dumps({"at_s": time.monotonic(), **values}), flush=True)


def steps() -> None:
    """Steps environments beside ``SyncVectorEnv``."""
    fns = [CountingEnv] * NUM_ENVS
    sync = SyncVectorEnv(fns)
    with rayvec.RayVecEnv(fns, **PLACE) as env:
        hosts = sorted({node.address for node in env.topology.nodes})
        assert_identical(env.reset(seed=3), sync.reset(seed=3))
        for number in range(200):
            actions = np.arange(number, number + NUM_ENVS) % 2
            assert_identical(env.step(actions), sync.step(actions), f"step {number}")
    say(hosts=hosts, steps=200)


def chunks() -> None:
    """Collects chunks on all hosts and without Ray."""
    found = []
    for place in (PLACE, {"num_nodes": 0, "workers_per_node": 0}):
        with rayvec.RayVecEnv([CountingEnv] * NUM_ENVS, **place) as env:
            found.append([env.rollout(_idle, 50, seed=3), env.rollout(_idle, 50)])
    for got, expected in zip(*found, strict=True):
        assert_same_chunk(got, expected)
    say(errors=counting_errors(found[0]))


def _idle(obs: Any) -> Any:
    return np.zeros(len(obs), int)


def train(run_dir: str, total_steps: str, num_nodes: str) -> None:
    """Trains decentralized PPO with a rank on each of some hosts, or resumes the run in a directory that exists."""
    if Path(run_dir).exists():
        result = rayvec.resume(run_dir, num_nodes=int(num_nodes), num_learners=int(num_nodes))
    else:
        config = rayvec.PPOConfig(
            env_id="CartPole-v1",
            run_dir=Path(run_dir),
            num_envs=NUM_ENVS,
            num_steps=32,
            total_steps=int(total_steps),
            eval_episodes=4,
            seed=1,
            address=os.environ["RAY_ADDRESS"],
            minibatch_size=64,
            learners="decentralized",
            num_learners=int(num_nodes),
            num_nodes=int(num_nodes),
            workers_per_node=1,
            checkpoint_interval_s=1.0,
        )
        try:
            result = rayvec.train(config)
        except RayvecError as error:
            say(error=" ".join([str(error), *error.__notes__]))
            raise
    say(steps=result.total_steps, eval_return=result.eval_return_mean)


def go_on(mode: str) -> None:
    """Steps until it is killed, and says what it sees."""
    chosen = {"on_node_loss": mode, "on_env_error": "restart"}
    with rayvec.RayVecEnv([CountingEnv] * NUM_ENVS, **PLACE, **chosen) as env:
        env.reset(seed=3)
        remote = [each.node for each in env._pool._nodes if hasattr(each.node, "_stream")]
        say(
            streams=[node._stream._sock.getpeername() for node in remote],
            pids=[node.worker_pids()[0] for node in remote],
        )
        number = 0
        while True:
            try:
                infos = env.step(np.zeros(NUM_ENVS, int))[-1]
            except NodeLostError as error:
                say(error=str(error))
                return
            number += 1
            restarted = np.flatnonzero(infos.get("env_restarted", ())).tolist()
            if restarted or number % 50 == 0:
                say(step=number, restarted=restarted, hosts=[node.address for node in env.topology.nodes])


def collect(num_nodes: str) -> None:
    """Collects chunks that the workers of some hosts take until it is killed, and says what it sees."""
    place = {"num_nodes": int(num_nodes), "workers_per_node": 1, "on_node_loss": "rehost", "on_env_error": "restart"}
    with rayvec.RayVecEnv([CountingEnv] * NUM_ENVS, **place) as env:
        collector = rayvec.Collector(env, _idle, prefetch=True, seed=3)
        number = 0
        while True:
            batch = collector.collect(n_step=20 * NUM_ENVS)
            number += 1
            errors = counting_errors(batch.chunks)
            if number % 10 == 0 or batch.stats.n_restarts or errors:
                hosts = [node.address for node in env.topology.nodes]
                say(chunk=number, restarts=batch.stats.n_restarts, hosts=hosts, errors=errors)


def start() -> None:
    """Makes environments on all hosts and says how it went."""
    began_s = time.monotonic()
    try:
        with rayvec.RayVecEnv([CountingEnv] * NUM_ENVS, **PLACE, on_node_loss="raise") as env:
            env.reset(seed=3)
            say(error=None)
    except RayvecError as error:
        say(error=str(error), seconds=time.monotonic() - began_s)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
