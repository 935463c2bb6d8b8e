"""An environment that takes a given time for a step."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class EmulatedEnv(gymnasium.Env[Any, Any]):
    """Steps that take time, in one episode that never ends.

    Args:
        step_s: Duration of a step in seconds.
        busy: Whether a step uses that much CPU time; else it sleeps, like a core of its own that works.
    """

    def __init__(self, step_s: float = 0.0, busy: bool = False) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.step_s = step_s
        self._busy = busy
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Changes nothing but the random generator."""
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes its time."""
        if self._busy:
            until = time.thread_time() + self.step_s
            while time.thread_time() < until:
                pass
        elif self.step_s:
            time.sleep(self.step_s)
        return self._obs, 1.0, False, False, {}
