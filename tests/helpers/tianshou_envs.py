"""Environments that Tianshou takes and that keep to no space, in a module that a worker imports quickly."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Line(gymnasium.Env[Any, Any]):
    """Counts steps to the right; ends after `size` of them; repeats its actions and options in infos."""

    observation_space = spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, size: int = 4, render_mode: str | None = None) -> None:
        self.size = size
        self.render_mode = render_mode
        self.pid = os.getpid()
        self._x, self._start = 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._x, self._start = 0, float(self.np_random.random())
        return self._obs(), {"options": options} if options else {}

    def step(self, action: Any) -> Any:
        self._x += 1
        over = self._x >= self.size
        info = {"action": repr(action), "deep": {"x": np.array([self._x])}} if self._x % 2 else {}
        return self._obs(), self._reward(), over and self._x % 2 == 0, over, info

    def _obs(self) -> Any:
        return np.array([self._x, self._start], np.float32)

    def _reward(self) -> Any:
        return self._x / 3

    def render(self, scale: int = 1) -> Any:
        return np.full((2, 2), self._x * scale)


class Told(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper with an attribute, and a space, of its own."""

    outer = "outer"

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.action_space = spaces.Discrete(7)


class Agents(Line):
    """Rewards two agents, by a list or by an array."""

    def __init__(self, kind: Any) -> None:
        super().__init__(size=9)
        self._kind = kind

    def _reward(self) -> Any:
        return self._kind([self._x / 3, 1.0])


class Ragged(Line):
    """Observations whose length is its size."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.observation_space = spaces.Box(0.0, 1.0, (size,), np.float64)

    def _obs(self) -> Any:
        return np.full(self.size, self._start)


class Held(Line):
    """Waits in a step with action 1 until a file is there; with action 2 it ends its process.

    Once one has ended, environments that are made afterwards wait for the file too.
    """

    def __init__(self, path: str) -> None:
        super().__init__(size=1000)
        self._path, self._lost = Path(path), Path(path).with_suffix(".lost")
        while self._lost.exists() and not self._path.exists():
            time.sleep(0.002)

    def step(self, action: Any) -> Any:
        while action == 1 and not self._path.exists():
            time.sleep(0.002)
        if action == 2:
            self._lost.touch()
            os._exit(3)
        return super().step(action)


class WithoutSpaces(gymnasium.Env[Any, Any]):
    """Observations are any objects."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return {"first"}, {}

    def step(self, action: Any) -> Any:
        return {action}, 1.0, False, False, {}
