"""A T-maze: what was seen at the beginning decides at the end (Bakker, "Reinforcement learning with LSTM", 2001)."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

CORRIDOR = 20


class TMaze(gymnasium.Env[NDArray[np.float32], int]):
    """A corridor of 20 steps, then a choice between left and right, once.

    The observation is (cue, whether this is the junction). The cue, -1 or 1, is there in the first step alone. In the
    corridor actions do nothing; at the junction action 0 is right for -1 and action 1 for 1, for a reward of 1.
    Without memory, no policy has a mean return above 0.5.
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draws the cue."""
        super().reset(seed=seed)
        self._cue, self._t = int(self.np_random.integers(2)), 0
        return np.array([2 * self._cue - 1, 0], np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Goes on by one step; the choice ends the episode."""
        if self._t == CORRIDOR:
            return np.zeros(2, np.float32), float(action == self._cue), True, False, {}
        self._t += 1
        return np.array([0, self._t == CORRIDOR], np.float32), 0.0, False, False, {}


def register() -> str:
    """Registers the maze and returns its id."""
    if "TMaze-v0" not in gymnasium.registry:
        gymnasium.register("TMaze-v0", TMaze)
    return "TMaze-v0"
