"""Environments that return unusual values, all with the same spaces."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

LOCK = threading.Lock()


class MaybeSpace(spaces.Space[Any]):
    """None, or a number."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return None

    def contains(self, x: Any) -> bool:
        return x is None or isinstance(x, int)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaybeSpace)


class OddValues(gymnasium.Env[Any, Any]):
    """Random observations of three numbers in episodes of one to three steps.

    Args:
        obs: What it returns for three random numbers; by default them.
        info: What it returns as an info, given itself; by default an empty dict.
        reward: What it returns for a random reward, given itself.
        flag: What it returns for a flag.
    """

    observation_space: Any = spaces.Box(-99.0, 99.0, (3,), np.float32)
    action_space = spaces.Discrete(4, start=-1)

    def __init__(
        self,
        obs: Callable[[NDArray[np.float64]], Any] = lambda numbers: numbers.astype(np.float32),
        info: Callable[[OddValues], Any] = lambda env: {},
        reward: Callable[[OddValues, float], Any] = lambda env, value: value,
        flag: Callable[[bool], Any] = lambda value: value,
    ) -> None:
        self._obs, self._info, self._reward, self._flag = obs, info, reward, flag
        self.t = self._end = 0
        self.action: Any = None
        self.kept: dict[str, Any] = {"inner": {"t": 0}, "count": np.zeros(2, int)}
        if obs is none_or_a_number:
            self.observation_space = MaybeSpace()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.t, self._end = 0, int(self.np_random.integers(1, 4))
        return self._obs(self.np_random.normal(size=3)), self._info(self)

    def step(self, action: Any) -> Any:
        self.t, self.action = self.t + 1, action
        over = self.t >= self._end
        ends = self._flag(over and self._end % 2 == 1), self._flag(over and self._end % 2 == 0)
        obs, reward = self._obs(self.np_random.normal(size=3)), float(self.np_random.normal())
        return obs, self._reward(self, reward), *ends, self._info(self)


def none_or_a_number(numbers: NDArray[np.float64]) -> Any:
    return None if numbers[0] > 0 else int(numbers[1] * 100)


def strided(numbers: NDArray[np.float64]) -> Any:
    wide = np.repeat(numbers.astype(">f4"), 2)[::-2]
    wide.setflags(write=False)
    return wide


def reserved_keys(env: OddValues) -> Any:
    """Returns keys that vector environments use themselves."""
    finals = {"final_obs": np.full(2, env.t), "final_info": {"t": env.t}}
    kinds: dict[str, Any] = {**finals, "episode": {"r": 1.5, "l": env.t}, "env_id": 7, "": None}
    return {key: value for key, value in kinds.items() if env.np_random.random() < 0.6}


def changing_infos(env: OddValues) -> Any:
    """Returns other keys and other types at every step."""
    draw = env.np_random.random
    return {
        "number": 1 if draw() < 0.5 else 2.5,
        "array": np.arange(2) if draw() < 0.5 else np.arange(2) / 3,
        f"key {env.t}": np.datetime64("2020-01-01") if draw() < 0.5 else np.array("text"),
        "nested": {"a" if draw() < 0.5 else "b": {"deep": [1, None]}},
        "action": type(env.action).__name__,
    }


def same_info(env: OddValues) -> Any:
    """Returns one dict for ever, and writes into what it holds."""
    env.kept["inner"]["t"] = env.t
    env.kept["count"] += 1
    return env.kept


def changes_the_process(env: OddValues) -> Any:
    """Writes to its output, seeds NumPy, changes its directory and its variables, and starts a thread."""
    before = os.getcwd()
    os.chdir("/")
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print("x" * 99)
    thread = threading.Thread(target=os.environ.__setitem__, args=("RAYVEC_TEST_ODD", "1"))
    thread.start()
    thread.join()
    del os.environ["RAYVEC_TEST_ODD"]
    os.chdir(before)
    return {"draw": np.random.rand()}


def unusual_reward(env: OddValues, value: float) -> Any:
    return [None, float("-inf"), 10**30, -0.0][env.np_random.integers(4)]


SometimesNone = partial(OddValues, none_or_a_number)
ReservedKeys = partial(OddValues, info=reserved_keys)


ODD_VALUES = [
    partial(OddValues, lambda numbers: numbers),
    partial(OddValues, lambda numbers: [int(number * 9) for number in numbers]),
    partial(OddValues, strided),
    partial(OddValues, reward=lambda env, value: np.array(value, np.float32), flag=np.bool_),
    partial(OddValues, reward=unusual_reward, flag=lambda value: 3 * int(value) or None),
    ReservedKeys,
    partial(OddValues, info=changing_infos),
    partial(OddValues, info=same_info),
    partial(OddValues, info=changes_the_process),
]
