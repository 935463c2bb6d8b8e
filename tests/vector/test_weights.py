"""Weights by version: published once, read by every worker of every node."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeVec
from helpers.obedient_envs import GatedEnv
from helpers.simple_policies import Weighs
from helpers.testing import CountingEnv

from rayvec.data import Chunk
from rayvec.errors import ConfigError
from rayvec.vector.chunks import WeightStore
from rayvec.vector.ray_vec_env import RayVecEnv


def rollout(env: RayVecEnv, store: WeightStore, num_steps: int) -> Chunk:
    env.rollout_async(store, num_steps, 0, 0)
    return env.rollout_wait().chunk


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 17)), 300_000])
def test_every_worker_acts_with_the_newest_version(make_vec: MakeVec, size: int) -> None:
    env = make_vec([CountingEnv] * 4, 2, 2)
    store = env.publish(Weighs(), 5)
    for version in range(6, 9):
        assert store.publish(np.full(size, version, np.float32)) == store.version == version
        chunk = rollout(env, store, 3)
        assert chunk.weights_version == version and (chunk.extras["rows"] == 1).all()
        assert (chunk.extras["sum"] == np.full(size, version, np.float32).sum()).all()


def test_wrong_weights_are_explained_and_nothing_changes(make_vec: MakeVec) -> None:
    env = make_vec([CountingEnv] * 2)
    store = env.publish(Weighs())
    for wrong in (np.zeros(3), np.zeros((3, 1), np.float32), [1.0], np.zeros(2, np.int64)):
        with pytest.raises(ConfigError, match="They must be float32"):
            store.publish(wrong)  # type: ignore[arg-type]
    assert store.version == 0
    store.publish(np.ones(3, np.float32))
    for wrong in (np.zeros(2, np.float32), np.zeros(4, np.float32), np.zeros(0, np.float32)):
        with pytest.raises(ConfigError, match="They must be float32"):
            store.publish(wrong)
    chunk = rollout(env, store, 1)
    assert (store.version, chunk.extras["sum"].tolist()) == (1, [[3.0, 3.0]])


def test_workers_forget_a_policy_whose_store_nobody_holds() -> None:
    """At the next publishing that finds no chunk pending, such as that of a collector for each evaluation."""
    with RayVecEnv([CountingEnv], num_nodes=0, workers_per_node=1) as env:
        (pids,) = env.worker_pids().values()
        for number in range(9):
            if number == 3:  # the memory of two pending chunks is there
                open_files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", *pids)]
            store = env.publish(Weighs())
            store.publish(np.zeros(3, np.float32))
            rollout(env, store, 1)
            del store
            gc.collect()
        found = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", *pids)]
        assert all(now <= before + 2 for now, before in zip(found, open_files, strict=True))
        kept = env.publish(Weighs())
        for _ in range(2):
            env.publish(Weighs()).drop()
        assert kept.publish(np.zeros(3, np.float32)) == 1 and rollout(env, kept, 1).weights_version == 1


@pytest.mark.parametrize(("nodes", "workers"), [(0, 0), (0, 1), (2, 1)])
def test_a_pending_chunk_acts_with_the_weights_of_when_it_was_requested(
    tmp_path: Path, make_vec: MakeVec, nodes: int, workers: int
) -> None:
    """The second chunk is requested with version 2, while the first one waits; then versions 3 and 4 are published."""
    gate = tmp_path / "gate"
    with make_vec([partial(GatedEnv, gate)] * 2, nodes, workers) as env:
        env.reset(seed=0)
        store = env.publish(Weighs())
        for version in (1, 2):
            store.publish(np.full(3, version, np.float32))
            env.rollout_async(store, 5, 5 * (version - 1), 0)
        for version in (3, 4):
            store.publish(np.full(3, version, np.float32))
        gate.touch()
        chunks = [env.rollout_wait().chunk for _ in range(2)]
        env.rollout_async(store, 5, 10, 0)
        chunks.append(env.rollout_wait().chunk)
    for version, chunk in zip((1, 2, 4), chunks, strict=True):
        assert chunk is not None and chunk.weights_version == version
        assert (chunk.extras["sum"] == 3 * version).all()
