"""Environments of a user, in a module that can be imported by name and imports no torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from helpers.testing import CountingEnv, PlainEnv


class Line(PlainEnv):
    """A walk on a line: an observation of two numbers, an episode of a few steps."""

    def __init__(self, length: int = 5, width: int = 2, high: float = 10) -> None:
        self.observation_space = spaces.Box(-high, high, (width,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.length = length

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, *rest = super().step(action)
        return obs, float(action == self.steps % 3), *rest

    def observe(self) -> Any:
        return self.np_random.normal(size=self.observation_space.shape).astype(np.float32)


class FailsOnce(Line):
    """Raises or hangs in its third step, unless a file says that it has."""

    def __init__(self, mark: Path, action: str) -> None:
        super().__init__()
        self._mark, self._action = mark, action

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.steps == 2 and not self._mark.exists():
            self._mark.touch()
            if self._action == "raise":
                raise OSError("the simulator has ended")
            threading.Event().wait()
        return super().step(action)


class Masked(gymnasium.Env[Any, Any]):
    """Refuses actions that its mask does not allow; the mask is drawn anew for each step.

    Args:
        where: ``"info"`` or ``"obs"``: where the mask is.
        nvec: Choices of the components of an action; an int for a Discrete.
        empty_at: Step after which the mask allows nothing.
        size: Numbers of the mask; by default as many as there are choices.
    """

    def __init__(
        self, where: str = "info", nvec: Any = 4, empty_at: int | None = None, size: int | None = None
    ) -> None:
        self.action_space = spaces.Discrete(nvec, start=2) if isinstance(nvec, int) else spaces.MultiDiscrete(nvec)
        self._nvec, self._where, self._empty_at = np.atleast_1d(nvec), where, empty_at
        self._size = int(self._nvec.sum()) if size is None else size
        box = spaces.Box(-10, 10, (3,), np.float32)
        parts = {"numbers": box, "action_mask": spaces.MultiBinary(self._size)}
        self.observation_space = spaces.Dict(parts) if where == "obs" else box
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._draw()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        choices = np.atleast_1d(action) - (2 if isinstance(self.action_space, spaces.Discrete) else 0)
        firsts = np.cumsum([0, *self._nvec[:-1]])
        assert self._mask[firsts + choices].all(), f"{action} is not allowed by {self._mask}"
        self._t += 1
        ended = self._t == 6
        obs, info = self._draw(empty=ended)
        return obs, float(choices[0] == 0), ended, False, info

    def _draw(self, empty: bool = False) -> tuple[Any, dict[str, Any]]:
        mask = self.np_random.integers(0, 2, self._size).astype(np.int8)
        if self._size == self._nvec.sum():
            ends = np.cumsum(self._nvec)
            mask[ends - 1 - self.np_random.integers(0, self._nvec)] = 1
        if empty or self._t == self._empty_at:
            mask[:] = 0
        self._mask = mask
        numbers = self.np_random.normal(size=3).astype(np.float32)
        if self._where == "obs":
            return {"numbers": numbers, "action_mask": mask}, {}
        return numbers, {"action_mask": mask}


class Diary(gymnasium.Env[Any, Any]):
    """Shows the number of steps in its episode, and the action before; one of its steps raises, once."""

    observation_space = spaces.Dict({"at": spaces.Tuple([spaces.Box(0, 99, (2,), np.float32)]), "name": spaces.Text(9)})
    action_space = spaces.Discrete(3, start=4)

    def __init__(self, env_index: int, failed: Path, fails_at: int = 0) -> None:
        self._len, self._failed = 3 + 4 * env_index, failed / str(env_index)
        self._steps_left = 0 if self._failed.exists() else fails_at

    def _shown(self, action: int) -> Any:
        return {"at": (np.array([self._step, action], np.float32),), "name": f"step {self._step}"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._shown(0), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps_left -= 1
        if self._steps_left == 0:
            self._failed.touch()
            raise RuntimeError("it broke")
        self._step += 1
        return self._shown(action), float(self._step), self._step == self._len, False, {}


class Lock(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Holds what can't be saved."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.seen = {1, 2}


class Levels(PlainEnv):
    """Episodes of 8 steps that succeed where the level is at most 2, with a frame in each info."""

    length = 8

    def __init__(self, env_index: int = -1) -> None:
        self.level, self.index = 1, env_index

    def set_level(self, level: int) -> int:
        self.level = level
        return self.index

    def info(self) -> dict[str, Any]:
        last = {"is_success": self.level <= 2, "text": "no number"} if self.steps == 8 else {}
        return {"frame": np.zeros((4, 4), np.uint8), **last}

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, float(self.level), *rest


class Optional(CountingEnv):
    """Remembers how it was made and reset."""

    label = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.options: Any = "never reset"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.options = options
        return super().reset(seed=seed)

    def add(self, number: int, *, other: int = 0) -> int:
        return self._total + number + other


class Outer(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper without any effect."""


def make_line(**kwargs: Any) -> Line:
    return Line(**kwargs)
