"""Weights to every worker of two simulated nodes: what crosses the network, and how long it takes.

    python benchmarks/publishing.py --parameters 1000000 --workers 8 --repeats 11

The nodes lie on one machine and speak over its loopback interface, whose bytes are counted while weights are
published and the next chunk begins with them. One node has the driver, so one transfer is what the other has to fetch.
Other work on the machine that uses the interface is counted too: as long a time without publishing stands beside it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from measure import heading, markdown, simulated_cluster, spread

from rayvec.policies.noise import NO_NOISE
from rayvec.testing import CountingEnv
from rayvec.vector.ray_vec_env import RayVecEnv


class Weighs:
    """A policy that records one of its weights."""

    noise = NO_NOISE

    def load_weights(self, weights: Any) -> None:
        """Copies them, as a net does."""
        self._weights = weights.copy()

    def act(self, obs: Any, noise: Any) -> Any:
        """Always the same action."""
        return np.zeros(len(obs), int), {"weight": np.full(len(obs), self._weights[-1])}


def loopback_bytes() -> int:
    """Returns how many bytes the loopback interface has carried."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.partition(":")[2].split()[0]) for line in lines if line.strip().startswith("lo:"))


def main(parameters: int = 1_000_000, workers: int = 8, repeats: int = 11) -> None:
    """Measures and prints the table.

    Args:
        parameters: How many.
        workers: Of each node.
        repeats: Of the measurement.
    """
    transfers: dict[str, list[float]] = {"published": [], "quiet": []}
    times_ms: list[float] = []
    size = 4 * parameters
    print(heading(("gymnasium", "ray", "numpy")))
    with (
        simulated_cluster(workers + 1, workers),
        RayVecEnv([CountingEnv] * 2 * workers, num_nodes=2, workers_per_node=workers) as env,
    ):
        store = env.publish(Weighs())
        store.publish(np.zeros(parameters, np.float32))
        env.rollout_workers(store, 1, 0, 0)
        for repeat in range(repeats):
            weights = np.full(parameters, repeat, np.float32)
            before, begin = loopback_bytes(), time.perf_counter()
            version = store.publish(weights)
            chunk = env.rollout_workers(store, 1, 0, 0).chunk
            elapsed_s = time.perf_counter() - begin
            assert chunk is not None and chunk.weights_version == version
            assert (chunk.extras["weight"] == repeat).all(), "a worker began with older weights"
            transfers["published"].append((loopback_bytes() - before) / size)
            times_ms.append(1000 * elapsed_s)
            before = loopback_bytes()
            time.sleep(elapsed_s)
            transfers["quiet"].append((loopback_bytes() - before) / size)
    rows = [
        ["bytes over the network, in copies of the weights", f"{np.median(transfers['published']):.2f}"],
        ["the same while nothing was published", f"{np.median(transfers['quiet']):.2f}"],
        ["publishing and a chunk of one step, ms", spread(times_ms)],
    ]
    print(markdown([f"{parameters:,} parameters, 2 nodes of {workers} workers", ""], rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
