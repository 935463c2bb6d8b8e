"""Environments that raise, hang, die and wait when they are told to, in a module that a worker imports quickly.

A worker that runs a class of a test module imports pytest and Ray first, which takes 0.3 s.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from helpers.testing import CountingEnv

GO, RAISE, HANG, DIE = range(4)
"""What an ObedientEnv is told by its action."""
SEED, EPISODE, STEP, TOTAL = range(4)
"""What the numbers of a CountingEnv's observation are."""


class ObedientEnv(CountingEnv):
    """Raises, hangs or kills its process when it is told to."""

    action_space = gymnasium.spaces.Discrete(4)

    def step(self, action: Any) -> Any:
        if action == RAISE:
            raise ValueError("told to raise")
        if action == HANG:
            time.sleep(3600)
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class RaisesOnReset(CountingEnv):
    """Every second reset of an instance raises."""

    resets = 0

    def reset(self, **kwargs: Any) -> Any:
        self.resets += 1
        if self.resets % 2 == 0:
            raise OSError("no more resets")
        return super().reset(**kwargs)


class TwoSteps(ObedientEnv):
    """Its episodes end with the second step."""

    def step(self, action: Any) -> Any:
        obs, rew, _, _, info = super().step(action)
        return obs, rew, obs[STEP] == 2, False, info


class NeverSteps(ObedientEnv):
    """Can't step at all."""

    def step(self, action: Any) -> Any:
        raise ArithmeticError("never")


class EndlessEnv(ObedientEnv):
    """Its episodes don't end."""

    def step(self, action: Any) -> Any:
        obs, rew, _, _, info = super().step(action)
        return obs, rew, False, False, info


def long_env() -> EndlessEnv:
    return EndlessEnv()


class SameAgain(gymnasium.Env[Any, Any]):
    """Every observation is the same; a time limit ends each episode after two steps, and the fourth step raises."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._taken = self._at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at = 0
        return np.ones(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._taken += 1
        self._at += 1
        if self._taken == self.fails_at:
            raise ValueError("no more")
        return np.ones(2, np.float32), 1.0, False, self._at == 2, {}

    fails_at = 4


class FailsAfterAnEnd(SameAgain):
    """The step that fails is the first of an episode."""

    fails_at = 3


class GatedEnv(CountingEnv):
    """After some steps it waits for a file."""

    def __init__(self, gate: Path, free_steps: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._gate, self._free_steps = gate, free_steps

    def step(self, action: Any) -> Any:
        if self._total >= self._free_steps:
            while not self._gate.exists():
                time.sleep(0.002)
        return super().step(action)


class FailingEnv(CountingEnv):
    """Raises in its sixth step."""

    def step(self, action: Any) -> Any:
        if self._total == 5:
            raise ArithmeticError("the sixth step")
        return super().step(action)


class Uneven(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Environments that differ in speed: the later ones sleep for longer."""

    def __init__(self, env: gymnasium.Env[Any, Any], sleep_s: float) -> None:
        super().__init__(env)
        self._sleep_s = sleep_s

    def step(self, action: Any) -> Any:
        time.sleep(self._sleep_s)
        return super().step(action)


def lean(obs: Any) -> Any:
    """Pushes in the direction in which the pole leans."""
    return (obs[:, 2] > 0).astype(np.int64)
