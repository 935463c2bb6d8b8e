"""An environment that takes a given time for a step, and records when it stepped."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

__all__ = ["EmulatedEnv", "clock_offsets"]

_REMEMBERED = 2048
"""Steps whose times are kept, the newest ones."""
_CLOCK_LOOKS = 7


class EmulatedEnv(gymnasium.Env[Any, Any]):
    """Steps that take time, in one episode that never ends.

    Args:
        step_s: Mean duration of a step in seconds.
        busy: Whether a step uses that much CPU time; else it sleeps, like a core of its own that works.
        sigma: Standard deviation of the logarithm of a step's duration; 0 for steps of equal length.
        obs_size: Numbers in an observation, float32.
    """

    def __init__(self, step_s: float = 0.0, busy: bool = False, sigma: float = 0.0, obs_size: int = 4) -> None:
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one handles Ctrl-C
        self.observation_space = spaces.Box(-np.inf, np.inf, (obs_size,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.step_s = step_s
        self._busy = busy
        self._sigma = sigma
        self._obs = np.zeros(obs_size, np.float32)
        self._times: NDArray[np.float64] | None = None
        self._count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Changes nothing but the random generator."""
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes its time."""
        begin = time.monotonic()
        duration_s = self.step_s
        if self._sigma:  # lognormal with mean step_s
            duration_s *= math.exp(self._sigma * self.np_random.standard_normal() - 0.5 * self._sigma**2)
        if self._busy:
            until = time.thread_time() + duration_s
            while time.thread_time() < until:
                pass
        elif duration_s:
            time.sleep(duration_s)
        if self._times is None:  # an array from __init__ would be read-only where Ray unpickles the environment
            self._times = np.zeros((_REMEMBERED, 2))
        self._times[self._count % _REMEMBERED] = begin, time.monotonic()
        self._count += 1
        return self._obs, 1.0, False, False, {}

    @property
    def clock(self) -> NDArray[np.float64]:
        """When the last steps began and ended by this machine's monotonic clock, ``float64 [m, 2]``, in order."""
        if self._times is None:
            return np.zeros((0, 2))
        if self._count <= _REMEMBERED:
            return self._times[: self._count].copy()
        return np.roll(self._times, -(self._count % _REMEMBERED), axis=0)

    @property
    def now(self) -> float:
        """This machine's monotonic clock."""
        return time.monotonic()

    @property
    def boot_id(self) -> str:
        """Identifies one boot of a machine: processes with the same one share a clock."""
        return _boot_id()


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def clock_offsets(get_attr: Callable[[str], Sequence[Any]]) -> NDArray[np.float64]:
    """Returns how far each environment's clock is ahead: 0 on this machine, else measured by the quickest call.

    The error is at most half of that call's round trip (F. Cristian, Probabilistic clock synchronization, 1989).

    Args:
        get_attr: Returns an attribute of every environment.
    """
    away = np.array([boot_id != _boot_id() for boot_id in get_attr("boot_id")])
    offsets, quickest = np.zeros(len(away)), np.inf
    for _ in range(_CLOCK_LOOKS if away.any() else 0):
        begin = time.monotonic()
        now = np.array(get_attr("now"))
        end = time.monotonic()
        if end - begin < quickest:
            quickest, offsets = end - begin, now - 0.5 * (begin + end)
    return np.where(away, offsets, 0.0)
