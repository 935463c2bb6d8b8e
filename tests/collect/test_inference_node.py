"""The policy acts in the process that owns the workers of a node: the same numbers, in large batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeVec
from gymnasium import spaces
from helpers.chunks import assert_same_chunk
from helpers.exact import TablePolicy
from helpers.simple_policies import Noting
from helpers.testing import CountingEnv, counting_errors

from rayvec.collect.collector import Collector
from rayvec.data import Chunk
from rayvec.errors import ConfigError
from rayvec.policies.networks import ActorCritic, flat_weights
from rayvec.policies.policy import Policy
from rayvec.vector.ray_vec_env import RayVecEnv


def test_it_acts_here_on_half_of_each_worker() -> None:
    with RayVecEnv([CountingEnv] * 6, num_nodes=0, workers_per_node=2) as env:
        chunk = env.rollout(Noting(), 8, "node", seed=1)
        assert (chunk.extras["pid"] == os.getpid()).all()
        assert (chunk.extras["rows"] == [[4, 4, 2, 4, 4, 2]]).all()
        in_workers = env.rollout(Noting(), 8, "worker", seed=1)
        assert not (in_workers.extras["pid"] == os.getpid()).any()
        assert counting_errors([chunk]) == counting_errors([in_workers]) == []


@pytest.mark.slow
def test_on_nodes_the_actor_acts(make_vec: MakeVec) -> None:
    env = make_vec([CountingEnv] * 6, nodes=2, workers=2)
    nodes = env.worker_pids()
    owners = [os.getpid(), nodes[env.topology.nodes[1].name][0]]
    sizes = [len(node.env_range) for node in env.topology.nodes]
    collector = Collector(env, Noting(), "node", seed=1)
    first = collector.collect(n_step=6 * 9)
    collector.set_weights(TablePolicy(seed=4).weights())
    batches = [first, collector.collect(n_step=6 * 9)]
    assert [batch.stats.weights_versions for batch in batches] == [(0, 0), (1, 1)]
    for batch in batches:
        assert batch.chunks[0].extras["pid"][0].tolist() == np.repeat(owners, sizes).tolist()
    assert counting_errors([chunk for batch in batches for chunk in batch.chunks]) == []
    os.kill(owners[1], signal.SIGKILL)  # the replacement gets the policy, and the newest weights
    again = collector.collect(n_step=6 * 9)
    assert again.stats.weights_versions == (1, 1) and again.stats.n_restarts == sizes[1]


def test_weights_and_faults(tmp_path: Path) -> None:
    """Versions of weights, a cut, and a worker that is killed, as in the driver."""
    found: list[list[Chunk]] = []
    for inference in ("driver", "node"):
        with RayVecEnv([CountingEnv] * 4, num_nodes=0, workers_per_node=2, on_env_error="restart") as env:
            pids = [pid for node in env.worker_pids().values() for pid in node][1:]
            collector = Collector(env, TablePolicy(), inference, seed=1)  # type: ignore[arg-type]
            chunks = []
            for number in range(4):
                if number == 2:
                    os.kill(pids[0], signal.SIGKILL)
                cut = (lambda steps: steps >= 12) if number == 3 else None
                chunks += collector.collect(n_step=40, cut=cut).chunks
                collector.set_weights(TablePolicy(seed=number).weights())
            found.append(chunks)
            collector.close()
    assert [chunk.weights_version for chunk in found[1]] == [0, 1, 2, 3]
    assert found[1][-1].num_steps == 3 and sum(len(chunk.restarts) for chunk in found[1]) == 2
    for got, expected in zip(found[1], found[0], strict=True):
        assert_same_chunk(got, expected)


IMAGES = spaces.Box(0, 255, (36, 36, 1), np.uint8)


@pytest.mark.parametrize("observation", [spaces.Box(-1, 1, (3,), np.float32), IMAGES], ids=["numbers", "images"])
def test_a_policy_on_a_device(observation: spaces.Box) -> None:
    """ "cpu:0" is a device other than "cpu" to torch's actor, which every machine has."""
    net = ActorCritic(observation, spaces.Discrete(3), normalize_obs=observation is not IMAGES)
    obs = np.stack([observation.sample() for _ in range(5)])
    here, there = Policy(net), Policy(net, device="cpu:0")
    noise = np.random.default_rng(0).random((5, here.noise.lanes))
    for _ in range(2):
        (act, extras), (other, others) = here.act(obs, noise), there.act(obs, noise)
        assert act.tolist() == other.tolist()
        np.testing.assert_allclose(others["logp"], extras["logp"], atol=1e-6)
        weights = np.random.default_rng(1).normal(0, 0.1, len(flat_weights(net)))
        for policy in (here, there):
            policy.load_weights(weights.astype(np.float32))


def test_what_cannot_work() -> None:
    one = [lambda obs: 0] * 4  # an object for each environment, and a function of one observation
    for policy, words in ((one, "It must be a rayvec.Policy, or a function"), (one[0], "must return one action")):
        with RayVecEnv([CountingEnv] * 4, num_nodes=0, workers_per_node=0) as env:
            with pytest.raises(ConfigError, match=words):
                env.rollout(policy, 3, "node", seed=0)
    with RayVecEnv([CountingEnv] * 2, num_nodes=0, workers_per_node=0) as env:
        for settings in ({"prefetch": True}, {"max_staleness": 2}):
            with pytest.raises(ConfigError, match="inference='node'"):
                Collector(env, TablePolicy(), "node", **settings)  # type: ignore[arg-type]
