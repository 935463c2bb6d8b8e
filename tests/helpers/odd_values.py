"""Environments that return unusual values, all with the same spaces."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Result = tuple[Any, Any, Any, Any, Any]


class OddValues(gymnasium.Env[Any, Any]):
    """Random observations of three numbers in episodes of one to three steps; subclasses change what is returned."""

    observation_space = spaces.Box(-99.0, 99.0, (3,), np.float32)
    action_space = spaces.Discrete(4, start=-1)

    def __init__(self) -> None:
        self._t = self._end = 0
        self._action: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._t, self._end = 0, int(self.np_random.integers(1, 4))
        return self.obs(self.np_random.normal(size=3)), self.info()

    def step(self, action: Any) -> Result:
        self._t, self._action = self._t + 1, action
        over = self._t >= self._end
        ends = self.flag(over and self._end % 2 == 1), self.flag(over and self._end % 2 == 0)
        return self.obs(self.np_random.normal(size=3)), self.reward(float(self.np_random.normal())), *ends, self.info()

    def obs(self, numbers: NDArray[np.float64]) -> Any:
        return numbers.astype(np.float32)

    def reward(self, value: float) -> Any:
        return value

    def flag(self, value: bool) -> Any:
        return value

    def info(self) -> Any:
        return {}


class MaybeSpace(spaces.Space[Any]):
    """None, or a number."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return None

    def contains(self, x: Any) -> bool:
        return x is None or isinstance(x, int)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaybeSpace)


class SometimesNone(OddValues):
    observation_space = MaybeSpace()  # type: ignore[assignment]

    def obs(self, numbers: NDArray[np.float64]) -> Any:
        return None if numbers[0] > 0 else int(numbers[1] * 100)


class DoublePrecision(OddValues):
    def obs(self, numbers: NDArray[np.float64]) -> Any:
        return numbers


class ListOfWholeNumbers(OddValues):
    def obs(self, numbers: NDArray[np.float64]) -> Any:
        return [int(number * 9) for number in numbers]


class Strided(OddValues):
    def obs(self, numbers: NDArray[np.float64]) -> Any:
        wide = np.repeat(numbers.astype(">f4"), 2)[::-2]
        wide.setflags(write=False)
        return wide


class ArraysAsNumbers(OddValues):
    def reward(self, value: float) -> Any:
        return np.array(value, np.float32)

    def flag(self, value: bool) -> Any:
        return np.bool_(value)


class NumbersAsFlags(OddValues):
    def reward(self, value: float) -> Any:
        return [float("nan"), float("-inf"), -0.0, 10**30][self._t]

    def flag(self, value: bool) -> Any:
        return 3 * int(value) or None


class ReservedKeys(OddValues):
    """Its infos have the keys that vector environments use themselves."""

    def info(self) -> Any:
        kinds = {
            "final_obs": np.full(2, self._t),
            "final_info": {"t": self._t},
            "episode": {"r": 1.5, "l": self._t},
            "env_id": 7,
            "": None,
        }
        return {key: value for key, value in kinds.items() if self.np_random.random() < 0.6}


class ChangingInfos(OddValues):
    """Its infos have other keys and other types at every step."""

    def info(self) -> Any:
        draw = self.np_random.random
        return {
            "number": 1 if draw() < 0.5 else 2.5,
            "array": np.arange(2) if draw() < 0.5 else np.arange(2) / 3,
            f"key {self._t}": np.datetime64("2020-01-01") if draw() < 0.5 else np.array("text"),
            "nested": {"a" if draw() < 0.5 else "b": {"deep": [1, None]}},
            "action": type(self._action).__name__,
        }


class SameInfo(OddValues):
    """Returns one dict for ever, and writes into what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Any] = {"inner": {"t": 0}, "count": np.zeros(2, int)}

    def info(self) -> Any:
        self._kept["inner"]["t"] = self._t
        self._kept["count"] += 1
        return self._kept


class ChangesTheProcess(OddValues):
    """Writes to its output, seeds NumPy, changes its directory and its variables, and starts a thread."""

    def info(self) -> Any:
        before = os.getcwd()
        os.chdir("/")
        np.random.seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print("x" * 99)
        thread = threading.Thread(target=os.environ.__setitem__, args=("RAYVEC_TEST_ODD", "1"))
        thread.start()
        thread.join()
        os.chdir(before)
        return {"draw": np.random.rand()}


ODD_VALUES = [
    DoublePrecision,
    ListOfWholeNumbers,
    Strided,
    ArraysAsNumbers,
    NumbersAsFlags,
    ReservedKeys,
    ChangingInfos,
    SameInfo,
    ChangesTheProcess,
]


LOCK = threading.Lock()


class KeepsLock(OddValues):
    """Its infos hold what can't be copied."""

    def info(self) -> Any:
        return {"lock": LOCK}
