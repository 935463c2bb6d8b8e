"""Environments that say who they are, and that fail as their actions ask."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rayvec.policies.noise import NO_NOISE

INDEX, INSTANCE, EPISODE, COUNT = range(4)
EPISODE_STEPS = 40
LARGE_BYTES = 4 << 20
"""More than the pipe of a worker holds: the worker is in the midst of its reply until the reply is read."""
_LIVES_S = 120


class Act(IntEnum):
    """What an action asks for, besides a step."""

    STEP = 0
    RAISE = 1
    HANG = 2
    DIE = 3
    FORK = 4
    """Fork a child that keeps everything open which the worker has open."""
    DAEMON = 5
    """Start a process in a session of its own."""
    THREAD = 6
    """Start a thread that never ends and is no daemon."""
    LARGE_AND_DIE = 7
    """Return an info of megabytes, and be killed a few milliseconds later, while it is sent."""


def large_info(index: float, count: float) -> bytes:
    """Returns the large info of an environment's step."""
    return bytes([int(index), int(count)]) * (LARGE_BYTES // 2)


class Witness(gymnasium.Env[NDArray[np.float64], int]):
    """Says who it is: index, instance, episode, step.

    Args:
        index: Index of the environment.
        directory: If it holds a file with the name of the index, the constructor removes the file and ends its process.
    """

    observation_space = gymnasium.spaces.Box(0, 2**53, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(len(Act))

    def __init__(self, index: int, directory: Path) -> None:
        with suppress(FileNotFoundError):
            (directory / str(index)).unlink()
            _fork()  # the child holds the worker's pipe open
            os._exit(3)
        self._state = np.array([index, time.time_ns() % 2**50, 0, 0], np.float64)
        self._started: set[Act] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._state[EPISODE] += 1
        self._state[COUNT] = 0
        return self._state.copy(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        act, info = Act(action), {}
        if act == Act.RAISE:
            raise RuntimeError("asked to raise")
        if act == Act.HANG:
            time.sleep(3600)
        if act == Act.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if act in (Act.FORK, Act.DAEMON, Act.THREAD) and act not in self._started:
            self._started.add(act)
            _start(act)
        time.sleep(0.0005)
        self._state[COUNT] += 1
        if act == Act.LARGE_AND_DIE:
            info["large"] = large_info(self._state[INDEX], self._state[COUNT])
            threading.Timer(random.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()
        return self._state.copy(), self._state[COUNT], self._state[COUNT] >= EPISODE_STEPS, False, info


def _start(act: Act) -> None:
    """Starts something that outlives the step; after two minutes, processes end by themselves."""
    if act == Act.THREAD:
        threading.Thread(target=threading.Event().wait).start()
    elif act == Act.DAEMON:
        subprocess.Popen(["sleep", str(_LIVES_S)], start_new_session=True)
    else:
        _fork()


def _fork() -> None:
    if os.fork() == 0:
        time.sleep(_LIVES_S)
        os._exit(0)


class Asking:
    """A policy that very rarely asks an environment to fail, chosen by the environment's own count.

    More often would be a crash loop. It records the first of its weights with every action.
    """

    noise = NO_NOISE
    num_weights = 100_000

    def __init__(self) -> None:
        self._weights = np.zeros(self.num_weights, np.float32)

    def act(self, obs: NDArray[np.float64], noise: Any) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        raises = (obs[:, EPISODE] == 161) & (obs[:, COUNT] == 17)
        hangs = (obs[:, EPISODE] == 301) & (obs[:, COUNT] == 9) & (obs[:, INDEX] % 8 == 3)
        acts = np.where(raises, Act.RAISE, np.where(hangs, Act.HANG, Act.STEP))
        return acts, {"version": np.full(len(obs), self._weights[0])}

    def load_weights(self, weights: NDArray[np.float32]) -> None:
        assert (weights == weights[0]).all(), "half of the weights are of another version"
        self._weights = weights.copy()
