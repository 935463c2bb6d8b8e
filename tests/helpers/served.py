"""Environments for servers. They need NumPy alone, as simulators under another Python may have no Gymnasium."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np


class Box:
    """A space as Gym and Gymnasium have it."""

    def __init__(self, size=2, dtype=np.float64):
        self.low, self.high = np.full(size, -1.0, dtype), np.full(size, 1.0, dtype)
        self.shape, self.dtype = (size,), np.dtype(dtype)


class Discrete:
    """A space as Gym has it, without a start."""

    n = 3


class Plant:
    """A plain object that counts its steps; an action of 2 does what `fault` says.

    With a folder, it opens once as many as `together` open there at the same time.
    """

    action_space = Discrete()

    def __init__(self, fault="", size=2, folder="", together=1):
        if folder:
            open(os.path.join(folder, str(os.getpid())), "w").close()
            while len(os.listdir(folder)) < together:
                time.sleep(0.01)
        self.observation_space = Box(size)
        self.fault, self.difficulty, self.steps = fault, 1, 0

    def reset(self, seed=None):
        self.steps = 0
        self.offset = 0.0 if seed is None else seed / 1000
        return self._obs()

    def step(self, action):
        assert action in (0, 1, 2), action
        if action == 2:
            getattr(self, f"_{self.fault}")()
        self.steps += 1
        info = {"count": np.int16(self.steps), "where": {"pid": os.getpid()}, "path": [self.steps, "a"]}
        return self._obs(), float(action), self.steps == 5, info | {"TimeLimit.truncated": self.steps == 5}

    def set_difficulty(self, difficulty, *, times=1):
        self.difficulty = difficulty * times
        return self.difficulty

    def _obs(self):
        return np.full(self.observation_space.shape, min(1.0, self.steps / 10) + self.offset)

    def _dies(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def _hangs(self):
        time.sleep(600)

    def _raises(self):
        raise KeyError("valve")

    def _raises_own(self):
        raise BrokenValve("valve")

    def _unsendable(self):
        self._obs = lambda: SimpleNamespace()


class BrokenValve(Exception):
    """An exception that rayvec's process does not know."""


def cannot_be_made():
    """Raises, as a constructor without its licence does."""
    raise ValueError("no licence")
