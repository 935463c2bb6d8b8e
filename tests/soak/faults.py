"""Makes environments, workers, actors, fork servers and nodes fail, nodes join and leave, and Ctrl-C."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.error import NoAsyncCallError

from rayvec.vector.ray_vec_env import RayVecEnv
from soak.auditor import Auditor
from soak.witness import Act, Witness

_MOST_A_MINUTE = 2
"""Faults of one worker or node within a minute. Six would be a crash loop, and some faults cost two restarts."""
_CALM_S = 65.0

Actions = dict[int, Act]


class Faults:
    """Makes one fault at a time; counts them in `made`.

    Args:
        env: The environments, which restart and rehost.
        cluster: Ray's ``Cluster``. Nodes are added to it and removed.
        directory: The directory that tells constructors to fail.
        rng: Chooses faults and victims.
    """

    def __init__(self, env: RayVecEnv, cluster: Any, directory: Path, rng: random.Random) -> None:
        self._env, self._cluster, self._directory, self._rng = env, cluster, directory, rng
        self._recent: deque[tuple[float, str]] = deque()
        self.made: Counter[str] = Counter()
        self._faults: dict[str, Callable[[], Actions]] = {
            **{act.name.lower(): partial(self._ask, act) for act in Act if act != Act.STEP},
            "constructor dies": self._constructor,
            "kill worker": self._kill_worker,
            "kill actor": self._kill_actor,
            "kill fork server": self._kill_fork_server,
            "node": self._change_node,
        }
        cluster.add_node(num_cpus=4)  # for the environments of a node that is lost

    def make(self, may_act: Any) -> Actions:
        """Makes one fault; returns the actions that ask environments to fail, by index.

        Args:
            may_act: Whether the next step of an environment passes it its action, ``bool [N]``.
        """
        self._may_act = may_act
        name = self._rng.choice([*self._faults])
        self.made[name] += 1
        return self._faults[name]()

    def _one_of(self, choices: dict[str, Any]) -> Any:
        """Returns one of some workers or nodes that has not failed often of late, or None."""
        while self._recent and self._recent[0][0] < time.monotonic() - _CALM_S:
            self._recent.popleft()
        counts = Counter(name for _, name in self._recent)
        calm = [name for name in choices if counts[name] < _MOST_A_MINUTE]
        if not calm:
            return None
        name = self._rng.choice(calm)
        self._recent.append((time.monotonic(), name))
        return choices[name]

    def _worker(self) -> tuple[int, range] | None:
        """Returns the process id and the environments of a worker."""
        found = {}
        pids = {name: iter(workers) for name, (_, *workers) in self._env.worker_pids().items()}
        for node in self._env.topology.nodes:  # several may be on one machine, after a loss
            for bounds in pairwise(node.worker_bounds):
                found[str(bounds)] = next(pids[node.name]), range(*bounds)
        worker: tuple[int, range] | None = self._one_of(found)
        return worker

    def _node(self) -> Any:
        """Returns a node of another process."""
        nodes = zip(self._env.topology.nodes, self._env.transports, strict=True)
        return self._one_of({str(node.env_range): node for node, transport in nodes if transport == "tcp"})

    def _ask(self, act: Act) -> Actions:
        worker = self._worker()
        able = [] if worker is None else [n for n in worker[1] if self._may_act[n]]
        return {self._rng.choice(able): act} if able else {}

    def _constructor(self) -> Actions:
        asked = self._ask(Act.DIE)
        for index in asked:
            (self._directory / str(index)).touch()
            self._recent.append(self._recent[-1])  # the worker is restarted twice
        return asked

    def _kill_worker(self) -> Actions:
        """A worker is killed at some time in the steps and chunks that follow."""
        if (worker := self._worker()) is not None:
            threading.Timer(self._rng.uniform(0, 0.5), _kill, (worker[0],)).start()
        return {}

    def _kill_actor(self) -> Actions:
        if (node := self._node()) is not None:
            os.kill(self._env.worker_pids()[node.name][0], signal.SIGKILL)
        return {}

    def _kill_fork_server(self) -> Actions:
        by_server = {node.name: node for node in self._env.topology.nodes}  # which nodes of one machine share
        if (node := self._one_of(by_server)) is not None:
            worker = self._env.worker_pids()[node.name][1]
            os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        return {}

    def _change_node(self) -> Actions:
        """Removes a node with all that runs there, and adds another."""
        if (node := self._node()) is not None:
            self._cluster.add_node(num_cpus=4)
            for each in self._cluster.worker_nodes.copy():
                if each.node_id == node.node_id:
                    self._cluster.remove_node(each, allow_graceful=False)
        return {}


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def interrupt_a_small_one(directory: Path, rng: random.Random) -> None:
    """Ctrl-C while environments are made, stepped, reset or closed; a chunk that is pending then arrives whole."""
    envs, idle = [partial(Witness, n, directory) for n in range(4)], np.zeros(4, np.int64)
    make = partial(RayVecEnv, envs, num_nodes=rng.choice([0, 1]), workers_per_node=2)
    with _interrupted(rng.uniform(0, 0.5)), make() as env:
        auditor = Auditor(env.reset(seed=0)[0])
        while True:
            auditor.step(*env.step(idle))
    chunks = []
    with make() as env:
        auditor = Auditor(env.reset(seed=0)[0])
        with _interrupted(rng.uniform(0, 0.3)):
            while True:
                chunks.append(env.rollout(lambda obs: idle[: len(obs)], 20))
        if not env.closed:
            with suppress(NoAsyncCallError):
                chunks.append(env.rollout_wait().chunk)
            chunks.append(env.rollout(lambda obs: idle[: len(obs)], 20))
        for chunk in chunks:
            auditor.chunk(chunk)


@contextmanager
def _interrupted(after_s: float) -> Iterator[None]:
    """Sends Ctrl-C to this process after a delay; the block must end with it."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
        timer.join()
        time.sleep(1.0)
    timer.join()
