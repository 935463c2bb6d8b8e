"""Claimed cores are free again however the process that claimed them ends."""

from __future__ import annotations

from typing import Any

import ray
from helpers.testing import CountingEnv
from helpers.waiting import wait_until

from rayvec.vector.ray_vec_env import RayVecEnv


class Trial:
    """Has environments within an actor, as a search does."""

    def open(self) -> None:
        self._env = RayVecEnv([CountingEnv], num_nodes=1, workers_per_node=1)


def free_cores() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_cores_claimed_within_an_actor_that_is_killed(ray_cluster: object) -> None:
    """The job goes on, as that of a search does whose trial has ended."""
    before = ray.cluster_resources()["CPU"]
    wait_until(lambda: free_cores() == before, "tests before have closed their environments")
    kind: Any = ray.remote(Trial)
    trial = kind.options(num_cpus=0).remote()
    ray.get(trial.open.remote())
    wait_until(lambda: free_cores() == before - 1, "the core is claimed")
    ray.kill(trial)
    wait_until(lambda: free_cores() == before, "the core is free")
