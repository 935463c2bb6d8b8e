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


def learn(run_dir: str) -> None:
    """Trains PPO for two iterations with learners in each place; says how many steps each took."""
    for learners, num_learners, num_nodes in (
        ("driver", 1, 3),
        ("dedicated", 1, 2),
        ("decentralized", 3, 3),
    ):
        place = {"learners": learners, "num_learners": num_learners, "num_nodes": num_nodes}
        place |= {"sync_fraction": 1.0} if learners == "decentralized" else {}  # a rank that is cut takes fewer steps
        address = os.environ["RAY_ADDRESS"]
        config = rayvec.PPOConfig(
            **SMALL, **place, run_dir=Path(run_dir, learners), total_steps=2 * 32 * NUM_ENVS, address=address
        )
        say(learners=learners, steps=rayvec.train(config).total_steps)


def resume(run_dir: str, num_nodes: str) -> None:
    """Resumes a decentralized run with a rank on each of some hosts."""
    say(steps=rayvec.resume(run_dir, num_nodes=int(num_nodes), num_learners=int(num_nodes)).total_steps)


def train(run_dir: str, num_nodes: str) -> None:
    """Trains decentralized PPO with a rank on each of some hosts until it is killed, or says how it ended."""
    place = {"learners": "decentralized", "num_nodes": _count(num_nodes), "num_learners": int(num_nodes[-1])}
    config = rayvec.PPOConfig(
        **SMALL, **place, run_dir=Path(run_dir), total_steps=10**7, address=os.environ["RAY_ADDRESS"]
    )
    try:
        rayvec.train(config)
    except RayvecError as error:
        say(error=" ".join([str(error), *getattr(error, "__notes__", ())]))
        raise


def _count(text: str) -> int | tuple[int, ...]:
    """Returns the value of ``num_nodes``: a number, or the least and the greatest, such as ``1:3``."""
    counts = tuple(map(int, text.split(":")))
    return counts if len(counts) == 2 else counts[0]


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


def collect(num_nodes: str) -> None:
    """Collects chunks that the workers of some hosts take until it is killed, and says what it sees."""
    place = {"num_nodes": _count(num_nodes), "workers_per_node": 1}
    faults = {"on_node_loss": "rehost", "on_env_error": "restart"}
    with rayvec.RayVecEnv([CountingEnv] * NUM_ENVS, **place, **faults) as env:
        collector = rayvec.Collector(env, _idle, prefetch=True, seed=3)
        number = 0
        while True:
            batch = collector.collect(n_step=20 * NUM_ENVS)
            number += 1
            time.sleep(PAUSE_S)
            errors = counting_errors(batch.chunks)
            if number % 10 == 0 or batch.stats.n_restarts or errors:
                say(chunk=number, restarts=batch.stats.n_restarts, errors=errors, **_hosts(env))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
