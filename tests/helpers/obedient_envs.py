"""Environments that raise, hang, die, wait and surprise when told to, in a module that a worker imports quickly."""

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


class TwoSteps(ObedientEnv):
    """Its episodes end with the second step."""

    def step(self, action: Any) -> Any:
        obs, rew, _, _, info = super().step(action)
        return obs, rew, obs[STEP] == 2, False, info


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


class Opener(CountingEnv):
    """Makes a file in one of its steps."""

    def __init__(self, gate: Path, at_step: int) -> None:
        super().__init__()
        self._gate, self._at_step = gate, at_step

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if self._total == self._at_step:
            self._gate.touch()
        return result


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
