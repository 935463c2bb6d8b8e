"""An environment that takes a given time for a step."""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["EmulatedEnv"]


class EmulatedEnv(gymnasium.Env[Any, Any]):
    """Steps that take time, in one episode that never ends.

    Args:
        step_s: Mean duration of a step in seconds.
        busy: Whether a step uses that much CPU time; else it sleeps, like a core of its own that works.
        sigma: Standard deviation of the logarithm of a step's duration; 0 for steps of equal length.
        obs_size: Numbers in an observation, float32.
    """

    def __init__(self, step_s: float = 0.0, busy: bool = False, sigma: float = 0.0, obs_size: int = 4) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (obs_size,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.step_s = step_s
        self._busy, self._sigma = busy, sigma
        self._obs = np.zeros(obs_size, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Changes nothing but the random generator."""
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes its time."""
        duration_s = self.step_s
        if self._sigma:  # lognormal with mean step_s
            duration_s *= math.exp(self._sigma * self.np_random.standard_normal() - 0.5 * self._sigma**2)
        if self._busy:
            until = time.thread_time() + duration_s
            while time.thread_time() < until:
                pass
        elif duration_s:
            time.sleep(duration_s)
        return self._obs, 1.0, False, False, {}
