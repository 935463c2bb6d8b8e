"""Claimed cores are free again however the process that claimed them ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray
from helpers.waiting import wait_until

from rayvec.cluster.ray_places import CoreClaim


class Claims:
    """Claims cores within an actor."""

    def claim(self, num_cpus: int) -> bool:
        self._claim = CoreClaim(ray.get_runtime_context().get_node_id(), num_cpus)
        return self._claim.wait(60.0)

    def release(self) -> None:
        self._claim.release()


def free_cores() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


@pytest.mark.parametrize(
    "end",
    [ray.kill, pytest.param(lambda actor: ray.get(actor.release.remote()), marks=pytest.mark.slow)],
    ids=["killed", "released"],
)
def test_cores_claimed_within_an_actor(ray_cluster: object, end: Callable[[object], None]) -> None:
    """The job goes on, as that of a search does whose trial has ended."""
    before = ray.cluster_resources()["CPU"]
    wait_until(lambda: free_cores() == before, "tests before have closed their environments")
    actor = ray.remote(Claims).options(num_cpus=0).remote()  # type: ignore[attr-defined]
    assert ray.get(actor.claim.remote(1))
    wait_until(lambda: free_cores() == before - 1, "the core is claimed")
    end(actor)
    wait_until(lambda: free_cores() == before, "the core is free")
