"""A soak test: random faults of all kinds, and not one transition may be wrong, doubled or joined.

    python tests/soak.py --minutes 10 --fault-every 5

Environments count their own steps and say in every observation who they are: index, instance, episode and
step. The driver steps them, by turns one by one and in chunks, of which it asks for one or two at a time, while
environments raise, hang and kill their process, workers and actors are killed, and nodes come and go. Every answer is
checked against the one before it. Not part of the default suite; `make soak` runs it.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from rayvec.data import Chunk
from rayvec.data.chunk_ops import counted_ends
from rayvec.vector.ray_vec_env import RayVecEnv

STEP, RAISE, HANG, DIE = range(4)
INDEX, INSTANCE, EPISODE, COUNT = range(4)
NUM_ENVS, EPISODE_STEPS = 24, 40


class Witness(gymnasium.Env):
    """Says who it is: index, instance, episode, step. Episodes end after some forty steps."""

    observation_space = gymnasium.spaces.Box(0, 2**53, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, index: int) -> None:
        self._state = np.array([index, time.time_ns() % 2**50, 0, 0], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode."""
        super().reset(seed=seed)
        self._state[EPISODE] += 1
        self._state[COUNT] = 0
        return self._state.copy(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Counts, or does what the action asks for."""
        if action == RAISE:
            raise RuntimeError("asked to raise")
        if action == HANG:
            time.sleep(3600)
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.0005)
        self._state[COUNT] += 1
        return self._state.copy(), self._state[COUNT], self._state[COUNT] >= EPISODE_STEPS, False, {}


class Auditor:
    """Knows the last observation of every environment and checks the next."""

    def __init__(self, obs: Any) -> None:
        self.last = obs.copy()
        self.done = np.zeros(NUM_ENVS, bool)
        self.seen: Counter[str] = Counter()

    def _begins(self, n: int, obs: Any) -> None:
        same = obs[INSTANCE] == self.last[n][INSTANCE]
        assert obs[INDEX] == n and obs[COUNT] == 0, (n, obs, self.last[n])
        assert obs[EPISODE] == (self.last[n][EPISODE] + 1 if same else 1), (n, obs, self.last[n])

    def _continues(self, n: int, before: Any, obs: Any, rew: float) -> None:
        assert (obs[:COUNT] == before[:COUNT]).all() and obs[COUNT] == before[COUNT] + 1 == rew, (n, before, obs, rew)
        self.seen["transitions"] += 1

    def step(self, obs: Any, rew: Any, terminated: Any, truncated: Any, info: dict[str, Any]) -> None:
        """Checks one step of all environments, NEXT_STEP."""
        restarted = info.get("env_restarted", np.zeros(NUM_ENVS, bool))
        for n in range(NUM_ENVS):
            if restarted[n] and not self.done[n]:
                answer = (n, obs[n], self.last[n], rew[n], terminated[n], truncated[n])
                assert (obs[n] == self.last[n]).all() and rew[n] == 0 and truncated[n] and not terminated[n], answer
                self.seen["restarts"] += 1
            elif self.done[n]:
                self._begins(n, obs[n])
                assert rew[n] == 0 and not terminated[n] and not truncated[n]
            else:
                self._continues(n, self.last[n], obs[n], rew[n])
                assert terminated[n] == (obs[n][COUNT] >= EPISODE_STEPS) and not truncated[n]
        self.last, self.done = obs.copy(), terminated | truncated

    def chunk(self, chunk: Chunk) -> None:
        """Checks every column of a chunk and where it joins what went before."""
        following = chunk.next_obs()
        restarts = {(t, n) for t, n in chunk.restarts.tolist()}
        cut = [(t - 1, n) for t, n in sorted(restarts) if t > 0 and chunk.valid[t - 1, n]]
        assert chunk.cuts.tolist() == [[t, n] for t, n in cut if not chunk.terminated[t, n]], (chunk.cuts, restarts)
        assert (counted_ends(chunk) == (chunk.terminated & chunk.valid)).all()
        for n in range(NUM_ENVS):
            if self.done[n] or (-1, n) in restarts:
                self._begins(n, chunk.obs[0, n])
                self.seen["restarts"] += (-1, n) in restarts
            else:
                assert (chunk.obs[0, n] == self.last[n]).all(), (n, chunk.obs[0, n], self.last[n])
            for t in range(chunk.num_steps):
                obs = chunk.obs[t, n]
                if not chunk.valid[t, n]:
                    assert (t, n) in restarts
                    self.seen["restarts"] += 1
                else:
                    self._continues(n, obs, following[t, n], chunk.rew[t, n])
                    done = chunk.terminated[t, n] or chunk.truncated[t, n]
                    assert chunk.terminated[t, n] == (following[t, n][COUNT] >= EPISODE_STEPS)
                    assert chunk.truncated[t, n] == ((t + 1, n) in restarts and not chunk.terminated[t, n])
                    after = chunk.obs[t + 1, n] if t + 1 < chunk.num_steps else chunk.last_obs[n]
                    assert (after[COUNT] == 0) == bool(chunk.terminated[t, n]), (n, t, after)
                    assert done or (after == following[t, n]).all()
        self.last, self.done = chunk.last_obs.copy(), np.zeros(NUM_ENVS, bool)
        self.seen["chunks"] += 1


class Faults:
    """Makes something fail now and then."""

    def __init__(self, env: RayVecEnv, cluster: Any, rng: random.Random) -> None:
        self._env, self._cluster, self._rng = env, cluster, rng
        self._extra = [cluster.add_node(num_cpus=4) for _ in range(1)]
        self.made: Counter[str] = Counter()

    def make(self) -> dict[int, int]:
        """Makes one fault; returns the actions that ask environments to fail, by index."""
        kind = self._rng.choice(
            ["raise", "raise two", "hang", "die", "kill worker", "kill worker", "kill actor", "node"]
        )
        self.made[kind] += 1
        victim = self._rng.randrange(NUM_ENVS)
        if kind in ("raise", "hang", "die"):
            return {victim: {"raise": RAISE, "hang": HANG, "die": DIE}[kind]}
        if kind == "raise two":
            return {victim: RAISE, (victim + 7) % NUM_ENVS: RAISE}
        if kind == "node":
            self._change_node()
            return {}
        nodes = self._env.worker_pids()
        pids = nodes[self._rng.choice(sorted(nodes))]
        pid = self._rng.choice(pids[1:]) if kind == "kill worker" else nodes[self._rng.choice(sorted(nodes))][0]
        os.kill(pid, signal.SIGKILL)
        return {}

    def some_worker(self) -> int:
        """Returns the process id of a worker."""
        nodes = self._env.worker_pids()
        return self._rng.choice(nodes[self._rng.choice(sorted(nodes))][1:])

    def _change_node(self) -> None:
        """Takes a node away, with all that runs there, and lets another come."""
        held = {node.node_id for node in self._env.topology.nodes[1:]}
        others = [node for node in self._cluster.worker_nodes if node.node_id in held]
        self._cluster.add_node(num_cpus=4)
        if others:
            self._cluster.remove_node(others[0], allow_graceful=False)


def _policy(obs: Any) -> Any:
    """Asks the environments for a fault very rarely, chosen by their own count: more often is a crash loop."""
    raises = (obs[:, EPISODE] == 161) & (obs[:, COUNT] == 17)
    hangs = (obs[:, EPISODE] == 101) & (obs[:, COUNT] == 9) & (obs[:, INDEX] % 8 == 3)
    return np.where(raises, RAISE, np.where(hangs, HANG, STEP))


def _memory_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def soak(minutes: float, fault_every_s: float, seed: int) -> None:
    """Runs for some minutes; raises AssertionError at the first thing that is not as it should be."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=4)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        env_fns = [lambda index=index: Witness(index) for index in range(NUM_ENVS)]
        with RayVecEnv(
            env_fns, workers_per_node=4, num_nodes=2, on_env_error="restart", step_timeout_s=2.0, on_node_loss="rehost"
        ) as env:
            _run(env, Faults(env, cluster, random.Random(seed)), time.monotonic() + 60 * minutes, fault_every_s)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _run(env: RayVecEnv, faults: Faults, until: float, fault_every_s: float) -> None:
    obs, _ = env.reset(seed=1)
    auditor, weights = Auditor(obs), env.publish(_policy)
    begin, next_fault, next_report = time.monotonic(), time.monotonic() + 2, time.monotonic() + 30
    memory: list[float] = []
    while time.monotonic() < until:
        for _ in range(50):
            actions = np.zeros(NUM_ENVS, np.int64)
            if time.monotonic() >= next_fault:
                next_fault += fault_every_s
                for n, action in faults.make().items():
                    if not auditor.done[n]:
                        actions[n] = action
            auditor.step(*env.step(actions))
        timer = threading.Timer(0.02, os.kill, (faults.some_worker(), signal.SIGKILL))
        if (
            time.monotonic() >= next_fault - fault_every_s / 2
            and faults.made["kill in chunk"] < sum(faults.made.values()) / 4
        ):
            faults.made["kill in chunk"] += 1
            timer.start()
            auditor.chunk(env.rollout(_policy, 30))
            timer.join()
        else:  # one behind the other
            for _ in range(2):
                env.rollout_async(weights, 30, 0, 0)
            for _ in range(2):
                chunk = env.rollout_wait().chunk
                assert chunk is not None
                auditor.chunk(chunk)
        if time.monotonic() >= next_report:
            next_report += 30
            memory.append(_memory_mib())
            open_files = len(os.listdir("/proc/self/fd"))
            print(
                f"{time.monotonic() - begin:4.0f} s {dict(auditor.seen)} faults {dict(faults.made)} "
                f"driver {memory[-1]:.0f} MiB, {open_files} files",
                flush=True,
            )
    assert auditor.seen["restarts"] > 0
    if len(memory) >= 8:
        early, late = max(memory[2:4]), max(memory[-2:])
        assert late < 1.1 * early + 10, f"memory grew from {early:.0f} to {late:.0f} MiB"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fault-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    os.environ.setdefault("RAY_AUTH_TOKEN", os.urandom(32).hex())
    with tempfile.TemporaryDirectory(prefix="rvs-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_TMPDIR"] = directory
        os.mkdir(f"{directory}/ray")
        soak(args.minutes, args.fault_every, args.seed)
    print("not one transition was wrong")


if __name__ == "__main__":
    sys.exit(main())
