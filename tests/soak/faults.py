"""Makes environments, workers, actors, fork servers and nodes fail."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rayvec.vector.ray_vec_env import RayVecEnv
from soak.witness import Act

_MOST_A_MINUTE = 2
"""Faults of one worker or node within a minute. Six would be a crash loop, and some faults cost two restarts."""
_CALM_S = 65.0

Actions = dict[int, Act]


class Faults:
    """Makes one fault at a time.

    Args:
        env: The environments, which restart and rehost.
        cluster: Ray's ``Cluster``. Nodes are added to it and removed.
        directory: The directory that tells constructors to fail.
        rng: Chooses faults and victims.
        only: The names of the faults to make; all of them if it is empty.

    Attributes:
        made: How often each fault was made.
    """

    def __init__(
        self, env: RayVecEnv, cluster: Any, directory: Path, rng: random.Random, only: tuple[str, ...] = ()
    ) -> None:
        self._env, self._cluster, self._directory, self._rng = env, cluster, directory, rng
        self._recent: deque[tuple[float, str]] = deque()
        self.made: Counter[str] = Counter()
        self._faults: dict[str, Callable[[], Actions]] = {
            **{act.name.lower().replace("_", " "): partial(self._ask, act) for act in Act if act != Act.STEP},
            "two raise": self._two_raise,
            "constructor dies": partial(self._constructor, "die"),
            "constructor sleeps": partial(self._constructor, "sleep"),
            "kill worker": self._kill_worker,
            "kill in large reply": self._kill_in_reply,
            "kill in chunk": self._kill_in_chunk,
            "kill actor": self._kill_actor,
            "kill fork server": self._kill_fork_server,
            "node": self._change_node,
        }
        self._names = [name for name in self._faults if not only or name in only]
        cluster.add_node(num_cpus=4)  # for the environments of a node that is lost

    def make(self, may_act: Any) -> Actions:
        """Makes one fault; returns the actions that ask environments to fail, by index.

        Args:
            may_act: Whether the next step of an environment passes it its action, ``bool [N]``.
        """
        self._may_act = may_act
        if not self._names:
            return {}
        name = self._rng.choice(self._names)
        self.made[name] += 1
        return self._faults[name]()

    def _worker(self) -> tuple[int, range] | None:
        """Returns the process id and the environments of a worker, or None if all have failed often of late."""
        calm = []
        for node in self._env.topology.nodes:
            for k, pid in enumerate(self._env.worker_pids()[node.name][1:]):
                envs = range(node.worker_bounds[k], node.worker_bounds[k + 1])
                if self._is_calm(str(envs)):
                    calm.append((pid, envs))
        if not calm:
            return None
        pid, envs = self._rng.choice(calm)
        self._recent.append((time.monotonic(), str(envs)))
        return pid, envs

    def _is_calm(self, name: str) -> bool:
        while self._recent and self._recent[0][0] < time.monotonic() - _CALM_S:
            self._recent.popleft()
        return sum(other == name for _, other in self._recent) < _MOST_A_MINUTE

    def _ask(self, act: Act) -> Actions:
        worker = self._worker()
        able = [] if worker is None else [n for n in worker[1] if self._may_act[n]]
        return {self._rng.choice(able): act} if able else {}

    def _two_raise(self) -> Actions:
        return {**self._ask(Act.RAISE), **self._ask(Act.RAISE)}

    def _constructor(self, how: str) -> Actions:
        asked = self._ask(Act.DIE)
        for index in asked:
            (self._directory / str(index)).write_text(how)
            self._recent.append(self._recent[-1])  # the worker is restarted twice
        return asked

    def _kill_worker(self) -> Actions:
        if (worker := self._worker()) is not None:
            os.kill(worker[0], signal.SIGKILL)
        return {}

    def _kill_in_reply(self) -> Actions:
        """All environments of a worker return large infos, and the worker is killed while it sends them."""
        if (worker := self._worker()) is None:
            return {}
        pid, envs = worker
        kill_later(pid, self._rng.uniform(0, 0.05))
        return dict.fromkeys(envs, Act.LARGE)

    def _kill_in_chunk(self) -> Actions:
        """A worker is killed at some time in the steps and chunks that follow."""
        if (worker := self._worker()) is not None:
            kill_later(worker[0], self._rng.uniform(0, 0.5))
        return {}

    def _node(self, transports: tuple[str, ...] = ("tcp",)) -> Any:
        """Returns a node that has not failed of late, or None."""
        calm = [
            node
            for node, transport in zip(self._env.topology.nodes, self._env.transports, strict=True)
            if transport in transports and self._is_calm(str(node.env_range))
        ]
        if not calm:
            return None
        node = self._rng.choice(calm)
        self._recent.append((time.monotonic(), str(node.env_range)))
        return node

    def _kill_actor(self) -> Actions:
        if (node := self._node()) is not None:
            os.kill(self._env.worker_pids()[node.name][0], signal.SIGKILL)
        return {}

    def _kill_fork_server(self) -> Actions:
        if (node := self._node(("shm", "tcp"))) is not None:
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


def kill_later(pid: int, after_s: float) -> threading.Timer:
    """Kills a process after a delay, if it still exists."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(after_s, kill)
    timer.start()
    return timer
