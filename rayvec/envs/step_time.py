"""Measures whether a step of an environment computes or waits: for another process, a socket, a licence, a robot."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import psutil
from gymnasium import spaces

from rayvec.envs.failures import FAILURES
from rayvec.wrappers.action_mask import MASK_KEY

_MAX_S = 0.3
_ENOUGH_S, _ENOUGH_STEPS = 0.05, 20
_MAX_BUSY = 0.75
"""With a larger busy share, more workers than cores gain less than the switches between them cost."""
_MIN_WAIT_S = 3e-4
"""Shorter waits cost less than one more process."""


class StepTime(NamedTuple):
    """How long a step of an environment takes, and how much of that it computes.

    Attributes:
        step_s: Mean duration of a step, in seconds.
        busy: Share of that duration in which the step uses a core, or would if a core were free, from 0 to 1. The
            processes that the environment has started count too. A step that never blocks is busy all the time.
    """

    step_s: float
    busy: float

    @property
    def waits(self) -> bool:
        """Whether a step waits for so long that the steps of other environments should run meanwhile."""
        return self.busy <= _MAX_BUSY and self.step_s * (1 - self.busy) >= _MIN_WAIT_S

    def __str__(self) -> str:
        return f"a step takes {self.step_s * 1e3:.3g} ms, of which it computes {self.busy:.0%}"


class StepTimer(gymnasium.Env[Any, Any]):
    """Makes an environment, whose steps :meth:`measure` takes. It has spaces of its own, which are never used.

    Args:
        make_env: Makes the environment.
    """

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(1)

    def __init__(self, make_env: Callable[[], gymnasium.Env[Any, Any]]) -> None:
        self._env = make_env()

    def measure(self) -> StepTime | str:
        """Returns what :func:`measure_step` does, or what the environment raised."""
        try:
            return measure_step(self._env)
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()


def measure_step(env: gymnasium.Env[Any, Any]) -> StepTime:
    """Steps an environment with random actions that its mask allows, at least once, otherwise for at most 0.3 s.

    Resets are not measured; all but the first count toward the 0.3 s. A step has waited only if this thread gave up its
    core by itself: what other programs take from a busy machine is no wait.
    """
    obs, info = env.reset()
    env.action_space.seed(0)
    deadline = time.perf_counter() + _MAX_S
    steps, wall_s, busy_s, blocked_s = 0, 0.0, 0.0, 0.0
    while True:
        busy_before_s, is_over = _busy_s(), False
        while not is_over:
            action, blocks, began_s = _sample(env.action_space, obs, info), _blocks(), time.perf_counter()
            obs, _, terminated, truncated, info = env.step(action)
            now_s = time.perf_counter()
            steps, wall_s = steps + 1, wall_s + now_s - began_s
            blocked_s += now_s - began_s if _blocks() > blocks else 0.0
            is_enough = (steps >= _ENOUGH_STEPS and wall_s >= _ENOUGH_S) or now_s >= deadline
            is_over = bool(terminated or truncated) or is_enough
        busy_s += _busy_s() - busy_before_s
        if is_enough:
            return StepTime(wall_s / steps, 1 - max(0.0, min(wall_s - busy_s, blocked_s)) / wall_s)
        obs, info = env.reset()


def _sample(space: spaces.Space[Any], obs: Any, info: Any) -> Any:
    """Returns a random action; of a Discrete, one that the mask in the info or the observation allows."""
    masks = [each[MASK_KEY] for each in (info, obs) if isinstance(each, dict) and MASK_KEY in each]
    if masks and isinstance(space, spaces.Discrete):
        return space.sample(np.asarray(masks[0], np.int8))
    return space.sample()


def _blocks() -> int:
    """Returns how often this thread has given up its core by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _busy_s() -> float:
    """Returns for how many seconds this process and those below it have used a core, or waited for one."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s = time.process_time() + _queued_s("self") + reaped.ru_utime + reaped.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, and counts as reaped
            clock = ~child.pid << 3 | 2  # of its processor time, as clock_getcpuclockid of Linux says
            times = child.cpu_times()
            busy_s += time.clock_gettime(clock) + times.children_user + times.children_system + _queued_s(child.pid)
    return busy_s


def _queued_s(process: int | str) -> float:
    """Returns for how long the main thread of a process has waited for a core, 0 where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
