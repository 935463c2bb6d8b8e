"""When is a run good enough? Greedy episodes every so often, with the clock stopped, the same for every library."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

EPISODES = 20
MARK = "judged "
"""What a line of standard output begins with that reports an evaluation, as JSON."""

Act = Callable[[NDArray[Any]], NDArray[Any]]
"""From observations ``[k, ...]`` to greedy actions ``[k, ...]``, as the environment takes them."""


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        env_id: The environment.
        threshold: Mean greedy return of `EPISODES` episodes that counts as solved.
        every: Steps between two evaluations.
    """

    env_id: str
    threshold: float
    every: int


TASKS = {
    "cartpole": Task("CartPole-v1", 475.0, 2_000),
    "pendulum": Task("Pendulum-v1", -200.0, 1_000),
}


def greedy_returns(env_id: str, episodes: int, seed: int, act: Act) -> NDArray[np.float64]:
    """Plays one episode in each of as many environments, side by side, and returns the sums of rewards."""
    envs = [gymnasium.make(env_id) for _ in range(episodes)]
    obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])
    returns, live = np.zeros(episodes), np.arange(episodes)
    while len(live):
        steps = [envs[i].step(action) for i, action in zip(live, act(obs), strict=True)]
        returns[live] += [float(step[1]) for step in steps]
        goes_on = np.array([not (step[2] or step[3]) for step in steps])
        obs, live = np.stack([step[0] for step in steps])[goes_on], live[goes_on]
    for env in envs:
        env.close()
    return returns


class Judge:
    """Evaluates a policy in training and ends the process at the first mean return that reaches the threshold.

    Args:
        task: What is learned.
        seed: Of the run; the episodes have others.
        began_s: ``time.monotonic()`` just before the process was started.
        limit_s: Ends the process after so much time of training.
    """

    def __init__(self, task: Task, seed: int, began_s: float, limit_s: float) -> None:
        self._task, self._seed, self._began_s, self._limit_s = task, seed, began_s, limit_s
        self._paused_s = 0.0
        self._due = task.every

    def __call__(self, steps: int, act: Act) -> None:
        """Evaluates if that is due after so many environment steps.

        Raises:
            SystemExit: The threshold has been reached, or the time is over.
        """
        if steps < self._due:
            return
        now_s = time.monotonic()
        clock_s = now_s - self._began_s - self._paused_s
        returns = greedy_returns(self._task.env_id, EPISODES, 10_000_000 + 1_000 * self._seed, act)
        mean = float(returns.mean())
        print(MARK + json.dumps({"steps": steps, "clock_s": round(clock_s, 3), "return_mean": mean}), flush=True)
        if mean >= self._task.threshold or clock_s > self._limit_s:
            sys.exit(0)
        self._due = (steps // self._task.every + 1) * self._task.every
        self._paused_s += time.monotonic() - now_s
