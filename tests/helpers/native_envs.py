"""Vector environments that tests use as native sub-batches."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from helpers.own_envs import Masked
from helpers.testing import CountingEnv


def counting(num_envs: int, mode: str = "NextStep") -> SyncVectorEnv:
    """Makes a vector environment that counts its steps."""
    return SyncVectorEnv([CountingEnv] * num_envs, autoreset_mode=mode)


def cartpoles(num_envs: int) -> SyncVectorEnv:
    """Makes CartPoles, each with a seed of its own."""
    return SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * num_envs)


def masked(num_envs: int) -> SyncVectorEnv:
    """Makes environments with action masks; the mask of an episode's last observation allows nothing."""
    return SyncVectorEnv([partial(Masked, "obs")] * num_envs)


def pendulums(num_envs: int) -> SyncVectorEnv:
    """Makes Pendulums with episodes of 50 steps, each with a seed of its own."""
    return SyncVectorEnv([partial(gymnasium.make, "Pendulum-v1", max_episode_steps=50)] * num_envs)


class Odd(SyncVectorEnv):
    """Returns something wrong from every step.

    Args:
        what: ``"rows"``: one row too many; ``"dtype"``: complex observations; ``"rewards"``: one reward for all;
            ``"flags"``: flags that are no bools; ``"no final"``: no last observations; ``"no mask"``: a mask that
            names none of them; ``"mode"``: no autoreset mode.
    """

    def __init__(self, what: str) -> None:
        super().__init__([CountingEnv] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
        self.what = what
        if what == "mode":
            self.metadata = {}

    def step(self, actions: Any) -> Any:
        obs, rew, terminated, truncated, info = super().step(actions)
        if self.what == "rows":
            obs = np.concatenate([obs, obs[:1]])
        elif self.what == "dtype":
            obs = obs.astype(complex)
        elif self.what == "rewards":
            rew = np.float64(1.0)  # type: ignore[assignment]
        elif self.what == "flags":
            terminated = terminated.astype(float)  # type: ignore[assignment]
        elif self.what == "no final":
            info.pop("final_obs", None)
        elif self.what == "no mask" and "final_obs" in info:
            info["_final_obs"] = np.zeros(3, bool)
        return obs, rew, terminated, truncated, info


class Fails(SyncVectorEnv):
    """Raises, or kills its process, in one step of the first process that makes it.

    Args:
        mode: Its autoreset mode.
        fault: ``"raise"`` or ``"kill"``.
        path: A file that exists once it has failed.
        at: The step.
    """

    def __init__(self, mode: str, fault: str, path: str, at: int = 5) -> None:
        super().__init__([CountingEnv] * 3, autoreset_mode=mode)
        self._fault, self._path, self._at, self._steps = fault, Path(path), at, 0

    def step(self, actions: Any) -> Any:
        self._steps += 1
        if self._steps == self._at and not self._path.exists():
            self._path.touch()
            if self._fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this sub-batch is broken")
        return super().step(actions)
