"""Environments with habits of their own, in a module that a worker imports quickly."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from helpers.testing import CountingEnv


class SlowCall(CountingEnv):
    """Sleeps so many seconds in everything, or in calls so long as it is told."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(step_s=seconds)
        self._seconds = seconds

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(self._seconds)
        return super().reset(**kwargs)

    def slow(self, seconds: float) -> float:
        time.sleep(max(seconds, self._seconds))
        return max(seconds, self._seconds)


class Unloadable:
    """Can be pickled; unpickling raises."""

    def __deepcopy__(self, memo: Any) -> Unloadable:
        return self

    def __reduce__(self) -> Any:
        return int, ("no number",)


class UnloadableInfo(CountingEnv):
    """The info of each step, and with an option of that name also of the reset, can't be unpickled."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed, options=options)
        return obs, info | ({"odd": Unloadable()} if options else {})

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return *result, info | {"odd": Unloadable()}


class OwnError(Exception):
    """Can't be built anew from its message alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


class OddInfo(CountingEnv):
    """Says what has no plain form in bytes, or would be changed by one."""

    ODD = ("\ud800", bytearray(b"x"), {1, 2}, 1 + 2j, [[[np.float16(1.5)]]], (np.str_(""), np.zeros((0, 3))), range(3))

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        deep: Any = "bottom"
        for _ in range(200):
            deep = [deep]
        odd = (*self.ODD, deep)[self._total % 8]
        return obs, reward, terminated, truncated, {"odd": odd, f"at {self._total}": odd, "t": self._t}


class TwoFaced(CountingEnv):
    """Answers a step with another shape or data type than its space says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return (obs[:1] if self._what == "shape" else obs + 0.5), *rest


class PressesCtrlC(CountingEnv):
    """When it is told to, it interrupts a process, which waits for it by then, before it answers."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid

    def step(self, action: Any) -> Any:
        if action:
            time.sleep(0.3)
            os.kill(self._pid, signal.SIGINT)
            time.sleep(0.3)
        return super().step(action)
