"""Environments whose steps wait, in this process or for another one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium

_SIMULATOR = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + 0.004
    while time.process_time() < end:
        pass
    print(flush=True)
"""


class Sleeping(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sleeps in each step, so long that a busy machine which wakes it up late does not look like computing."""

    def step(self, action: Any) -> Any:
        time.sleep(0.05)
        return self.env.step(action)


class Simulated(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Waits in each step for a process that it has started, which computes."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SIMULATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self, action: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self._process.stdout.readline()
        return self.env.step(action)

    def close(self) -> None:
        self._process.communicate()
        self.env.close()


class Noted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Writes to a file what is done with it: made, reset, step, close."""

    def __init__(self, env: gymnasium.Env[Any, Any], path: Path, name: str) -> None:
        super().__init__(env)
        self._path, self._name = path, name
        self._note("make")

    def _note(self, what: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{self._name} {what}\n")

    def reset(self, **kwargs: Any) -> Any:
        self._note("reset")
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._note("step")
        return self.env.step(action)

    def close(self) -> None:
        self._note("close")
        self.env.close()


def make_sleeping() -> gymnasium.Env[Any, Any]:
    """Makes a CartPole that sleeps."""
    return Sleeping(gymnasium.make("CartPole-v1"))


def make_subprocess_env() -> gymnasium.Env[Any, Any]:
    """Makes a CartPole that waits for a process of its own, which computes."""
    return Simulated(gymnasium.make("CartPole-v1"))


def make_noted(path: Path, name: str = "env") -> gymnasium.Env[Any, Any]:
    """Makes a CartPole that notes what is done with it."""
    return Noted(make_sleeping(), path, name)
