"""Environments with habits of their own, in a module that a worker imports quickly."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from helpers.exact import WordSpace
from helpers.testing import CountingEnv, FaultyEnv


class KeepsActions(CountingEnv):
    action_space = spaces.Box(-9.0, 9.0, (2,), np.float64)
    kept: list[Any]

    def __init__(self) -> None:
        super().__init__(max_episode_steps=100)
        self.kept = []

    def step(self, action: Any) -> Any:
        self.kept.append(action)
        return super().step(action)

    def first_action(self) -> Any:
        return self.kept[0]


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


class Echo(CountingEnv):
    action_space = spaces.Text(100_000)

    def step(self, action: str) -> Any:
        obs, reward, _, _, _ = super().step(0)
        return obs, reward, False, False, {"echo": action}


class Unpicklable(CountingEnv):
    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"lock": threading.Lock()}

    def lock(self) -> Any:
        return threading.Lock()


class Unloadable:
    """Can be pickled; unpickling raises."""

    def __deepcopy__(self, memo: Any) -> Unloadable:
        return self

    def __reduce__(self) -> Any:
        return int, ("no number",)


def _none_under_ray() -> int:
    if "ray" in sys.modules:
        raise ValueError("no number")
    return 3


class UnloadableUnderRay:
    """Is unpickled as 3 in workers, and raises in actors of Ray."""

    def __reduce__(self) -> Any:
        return _none_under_ray, ()


class Returns(CountingEnv):
    def back(self, value: Any) -> Any:
        return value

    def unloadable(self) -> Any:
        return Unloadable()


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


class HasChild(FaultyEnv):
    def __init__(self, path: str) -> None:
        super().__init__("kill")
        child = os.fork()
        if child == 0:
            while True:
                time.sleep(3600)
        Path(path).write_text(str(child))


class WritesWhenClosed(CountingEnv):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        Path(self._path).touch()


class LargeInfo(CountingEnv):
    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"large": np.full(20_000, reward)}


class Imported(CountingEnv):
    def heavy(self) -> list[str]:
        return sorted({"ray", "torch", "tianshou"} & set(sys.modules))


class Parent(CountingEnv):
    def child_says(self) -> int:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=theirs.send, args=(42,))
        child.start()
        child.join()
        return int(ours.recv())


class OneInfo(CountingEnv):
    """Uses the same info dict for ever; episodes of two steps."""

    def __init__(self) -> None:
        super().__init__()
        self._info: dict[str, Any] = {}

    def reset(self, **kwargs: Any) -> Any:
        obs, _ = super().reset(**kwargs)
        self._info["at"] = f"reset {self._episode}"
        return obs, self._info

    def step(self, action: Any) -> Any:
        obs, reward, _, _, _ = super().step(action)
        self._info["at"] = f"step {self._t}"
        return obs, reward, self._t == 2, False, self._info


class ReusedObject(CountingEnv):
    """Uses the same observation, which is no array, for ever; episodes of three steps."""

    observation_space = WordSpace()  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self._same: dict[str, Any] = {"word": "a", "numbers": np.zeros(1)}

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self._same["numbers"][0] = 0
        return self._same, {}

    def step(self, action: Any) -> Any:
        super().step(action)
        self._same["numbers"][0] += 1
        return self._same, 1.0, self._t == 3, False, {}


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


class TellsPid(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def made_in(self) -> int:
        return self._pid


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


class InterruptsItsClose(CountingEnv):
    """Its close interrupts a process, which waits for it, and does not end."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid

    def close(self) -> None:
        os.kill(self._pid, signal.SIGINT)
        time.sleep(300)


class Heir(CountingEnv):
    """Ends its process with action 1; one that is made after that raises, or waits until a file is there.

    Its resets take so many seconds then.
    """

    def __init__(self, directory: str, error: str = "", reset_s: float = 0.0) -> None:
        super().__init__(max_episode_steps=1000)
        self._died, go = Path(directory, "died"), Path(directory, "go")
        self._reset_s = reset_s if self._died.exists() else 0.0
        if self._died.exists() and error:
            raise KeyError(error)
        while self._died.exists() and not go.exists():
            time.sleep(0.002)

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(self._reset_s)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if action == 1:
            self._died.touch()
            os._exit(3)
        return super().step(action)


class DiesLate(CountingEnv):
    """Ends its process with action 1; one that is made after that does so by itself after so many seconds."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__()
        self._died = Path(path)
        if self._died.exists():
            time.sleep(seconds)
            os._exit(3)

    def step(self, action: Any) -> Any:
        if action == 1:
            self._died.touch()
            os._exit(3)
        return super().step(action)
