"""Faults that end a vector environment: each makes one of its own, and says what must come of it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, NoAsyncCallError

from rayvec.errors import WorkerLostError
from rayvec.vector.ray_vec_env import RayVecEnv
from soak.auditor import Auditor
from soak.faults import kill_later
from soak.witness import Act, Witness

_NUM_ENVS = 4


class ShortLives:
    """Makes small vector environments beside the large one, and ends them by one fault each.

    Args:
        directory: An empty directory.
        rng: Chooses moments.
        num_nodes: 0 to do without Ray, 1 to reserve the cores by Ray.
    """

    def __init__(self, directory: Path, rng: random.Random, num_nodes: int) -> None:
        self._directory, self._rng, self._num_nodes = directory, rng, num_nodes

    def _make(self, **kwargs: Any) -> RayVecEnv:
        envs = [partial(Witness, n, self._directory) for n in range(_NUM_ENVS)]
        return RayVecEnv(envs, num_nodes=self._num_nodes, workers_per_node=2, **kwargs)

    def killed_in_a_reply(self) -> None:
        """Without restarts, a worker that is killed while it sends is an error, or the whole reply arrived."""
        with self._make() as env:
            obs, _ = env.reset(seed=0)
            auditor = Auditor(obs)
            pid = next(iter(env.worker_pids().values()))[1]
            timer = kill_later(pid, self._rng.uniform(0, 0.05))
            with pytest.raises(WorkerLostError):
                while True:
                    auditor.step(*env.step(np.full(_NUM_ENVS, Act.LARGE)))
            timer.join()
            assert env.closed

    def closed_by_a_thread(self) -> None:
        """Another thread closes the environments while a step waits."""
        env = self._make()
        env.reset(seed=0)
        timer = threading.Timer(self._rng.uniform(0, 0.2), partial(env.close, timeout=0.5))
        timer.start()
        with pytest.raises(ClosedEnvironmentError):
            env.step(np.array([Act.HANG, *[Act.STEP] * (_NUM_ENVS - 1)]))
            env.step(np.zeros(_NUM_ENVS, np.int64))  # it was closed before the first step began
        timer.join()

    def interrupted_step(self) -> None:
        """Ctrl-C while environments are made, reset, stepped or closed."""
        with interrupted(self._rng.uniform(0, 0.5)), self._make() as env:
            obs, _ = env.reset(seed=0)
            auditor = Auditor(obs)
            while True:
                auditor.step(*env.step(np.zeros(_NUM_ENVS, np.int64)))

    def interrupted_chunks(self) -> None:
        """After Ctrl-C, a chunk that was pending arrives whole, or the environments are closed."""
        chunks = []
        with self._make() as env:
            obs, _ = env.reset(seed=0)
            with interrupted(self._rng.uniform(0, 0.3)):
                weights = env.publish(_no_faults)
                while True:
                    env.rollout_async(weights, 20, 0, 0)
                    chunks.append(env.rollout_wait().chunk)
            auditor = Auditor(obs)
            if not env.closed:
                with suppress(NoAsyncCallError):
                    chunks.append(env.rollout_wait().chunk)
                chunks.append(env.rollout(_no_faults, 20))
            for chunk in chunks:
                auditor.chunk(chunk)

    def all(self) -> dict[str, Callable[[], None]]:
        """Returns the faults by name."""
        faults = [self.killed_in_a_reply, self.closed_by_a_thread, self.interrupted_step, self.interrupted_chunks]
        return {each.__name__.replace("_", " "): each for each in faults}


def _no_faults(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


@contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """Sends Ctrl-C to this process after a delay; the block must end with it."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
        timer.join()
        time.sleep(1.0)
    timer.join()
