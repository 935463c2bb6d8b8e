"""Seconds from a fault until stepping resumes, until the driver raises, or until all processes are gone.

    python benchmarks/faults.py

Every fault is real. Environments sleep a millisecond for a step; stepping has resumed when a step returns that has
``info["env_restarted"]``. Nodes are simulated, and share this machine's cores with the clusters that are made.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import tyro
from cluster import timed
from measure import heading, simulated_cluster, tree

from rayvec.bench.terminal import show_table, spread
from rayvec.errors import NodeLostError
from rayvec.testing import TimedEnv
from rayvec.vector.ray_vec_env import RayVecEnv

STEP_TIMEOUT_S = 0.5
DRIVER = """
import sys
import numpy as np
import ray
from rayvec.testing import TimedEnv
from rayvec.vector.ray_vec_env import RayVecEnv

ray.init(address=sys.argv[1], log_to_driver=False, logging_level=40)
env = RayVecEnv([lambda: TimedEnv(1e-3)] * 8, num_nodes=2, workers_per_node=2)
env.reset(seed=0)
print(*[pid for pids in env.worker_pids().values() for pid in pids], flush=True)
while True:
    env.step(np.zeros(8, np.int64))
"""


class Hanging(TimedEnv):
    """Never comes back from a step with action 1."""

    def __init__(self) -> None:
        super().__init__(1e-3, max_episode_steps=1000, infos=False)

    def step(self, action: Any) -> Any:
        """Steps, or hangs."""
        if action == 1:
            time.sleep(3600.0)
        return super().step(action)


def stepped_on(env: RayVecEnv, cause: Callable[[], object]) -> float:
    """Causes a fault; returns seconds from then until a step reports restarted environments."""
    begin, info = time.perf_counter(), {}
    cause()
    while "env_restarted" not in info:
        *_, info = env.step(np.zeros(env.num_envs, np.int64))
    return time.perf_counter() - begin


def pids(env: RayVecEnv, node: int) -> list[int]:
    """Returns the processes of a node: its actor, then its workers."""
    return env.worker_pids()[env.topology.nodes[node].name]


def stepping(make: Callable[[], Any], **kwargs: Any) -> RayVecEnv:
    """Returns eight environments on two nodes, that have stepped."""
    env = RayVecEnv([make] * 8, num_nodes=2, workers_per_node=2, on_env_error="restart", **kwargs)
    env.reset(seed=0)
    for _ in range(20):
        env.step(np.zeros(8, np.int64))
    return env


def worker_killed(cluster: Any) -> float:
    """A worker process is killed (SIGKILL): its environments are restarted."""
    with stepping(timed(1e-3)) as env:
        worker = pids(env, 1)[1]
        return stepped_on(env, lambda: os.kill(worker, signal.SIGKILL))


def environment_hangs(cluster: Any) -> float:
    """An environment hangs: its worker is replaced, measured from the end of `step_timeout_s`."""
    with stepping(Hanging, step_timeout_s=STEP_TIMEOUT_S) as env:
        begin = time.perf_counter()
        *_, info = env.step(np.eye(8, dtype=np.int64)[5])
        assert info["env_restarted"][5]
        return time.perf_counter() - begin - STEP_TIMEOUT_S


def node_lost(cluster: Any) -> float:
    """A raylet is killed, others have free cores: its environments resume on another node."""
    extra = cluster.add_node(num_cpus=2)
    with RayVecEnv([timed(1e-3)] * 12, num_nodes=3, workers_per_node=2, on_node_loss="rehost") as env:
        env.reset(seed=0)
        return stepped_on(env, lambda: cluster.remove_node(extra, allow_graceful=False))


def no_core_left(cluster: Any) -> float:
    """A raylet is killed, no other node has a free core: an error."""
    extra = cluster.add_node(num_cpus=2)
    with RayVecEnv([timed(1e-3)] * 10, workers_per_node=None, on_node_loss="rehost") as env:
        env.reset(seed=0)
        begin = time.perf_counter()
        try:
            stepped_on(env, lambda: cluster.remove_node(extra, allow_graceful=False))
        except NodeLostError:
            return time.perf_counter() - begin
        raise AssertionError("a core was free")


def driver_killed(cluster: Any) -> float:
    """The driver is killed (SIGKILL): workers, actors and their shared memory are gone."""
    memory = set(os.listdir("/dev/shm"))
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    started = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(started) == 6
    time.sleep(0.5)
    family = {pid for root in started for pid in tree(root)}
    driver.kill()
    begin = time.perf_counter()
    while any(map(alive, family)) or set(os.listdir("/dev/shm")) - memory:
        time.sleep(0.01)
    driver.wait()
    return time.perf_counter() - begin


def alive(pid: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


CASES: dict[Callable[[Any], float], str] = {
    worker_killed: "2",
    environment_hangs: "2",
    node_lost: "20",
    no_core_left: "10",
    driver_killed: "10",
}
"""Faults, and within how many seconds they are to be over."""


def main(repeats: int = 5) -> None:
    """Causes every fault a few times, and prints how long each took."""
    print(heading())
    rows = []
    for case, aim_s in CASES.items():
        with simulated_cluster(0, 4, 4) as cluster:
            found = [case(cluster) for _ in range(repeats)]
        rows.append([(case.__doc__ or "").rstrip("."), spread(found, ".2f"), aim_s])
    show_table("Seconds until it is over", ["fault", "s", "aim, s"], rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
