"""Environments that show mistakes of whatever steps them, and a comparison of every bit and data type."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rayvec.data import Chunk

Result = tuple[Any, float, bool, bool, dict[str, Any]]
Start = tuple[Any, dict[str, Any]]


def assert_identical(got: Any, expected: Any, path: str = "value") -> None:
    """Asserts that two values, nested in any way, are equal to the last bit: types, data types, shapes and contents."""
    _demand(type(got) is type(expected), path, type(got).__name__, type(expected).__name__)
    if isinstance(expected, dict):
        _demand(list(got) == list(expected), path, f"keys {list(got)}", list(expected))
        for key in expected:
            assert_identical(got[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        _demand(len(got) == len(expected), path, f"{len(got)} items", len(expected))
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_identical(a, b, f"{path}[{i}]")
    elif isinstance(expected, (np.ndarray, np.generic)):
        _demand(got.dtype == expected.dtype, path, f"dtype {got.dtype}", expected.dtype)
        _demand(got.shape == expected.shape, path, f"shape {got.shape}", expected.shape)
        if expected.dtype == object:
            for i, (a, b) in enumerate(zip(got.flat, expected.flat, strict=True)):
                assert_identical(a, b, f"{path}.flat[{i}]")
        else:
            _demand(got.tobytes() == expected.tobytes(), path, repr(got), repr(expected))
    elif isinstance(expected, float):
        _demand(got.hex() == expected.hex(), path, repr(got), repr(expected))
    else:
        _demand(bool(got == expected), path, repr(got), repr(expected))


def _demand(holds: bool, path: str, got: object, expected: object) -> None:
    if not holds:
        raise AssertionError(f"{path}: {got}, expected {expected}")


class PlainEnv(gymnasium.Env[Any, Any]):
    """Observes zeros, with rewards of 1 and episodes of `length` steps, or without an end; tests change one thing."""

    observation_space: Any = spaces.Box(-1, 1, (1,), np.float32)
    action_space: Any = spaces.Discrete(2)
    length = steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), self.info()

    def step(self, action: Any) -> Result:
        self.steps += 1
        return self.observe(), 1.0, self.steps == self.length, False, self.info()

    def observe(self) -> Any:
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def info(self) -> dict[str, Any]:
        return {}


class CountingEnv(gymnasium.Env[NDArray[np.int64], Any]):
    """Counts in its observation: ``int64 [4]`` of its seed, its episode, the step within it, and all its steps.

    :func:`counting_errors` finds transitions that are doubled or lost, or that join two episodes. The reward of a step
    is the number of all steps. Episodes have 1 to `max_episode_steps` steps, without randomness; every other episode
    is truncated.
    """

    observation_space = spaces.Box(-(2**62), 2**62, (4,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, max_episode_steps: int = 7, step_s: float = 0.0) -> None:
        self._max = max_episode_steps
        self._step_s = step_s
        self._seed = self._episode = -1
        self._t = self._total = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._episode, self._total = seed, -1, 0
        self._episode += 1
        self._t = 0
        return self._obs(), {"began": self._episode}

    def step(self, action: Any) -> Result:
        if self._step_s:
            time.sleep(self._step_s)
        self._t += 1
        self._total += 1
        over = self._t >= 1 + (7 * self._episode + 3 * self._seed) % self._max
        cut = over and self._episode % 2 == 1
        info = {"step": self._total} if self._total % 3 == 0 else {}
        return self._obs(), float(self._total), over and not cut, cut, info

    def _obs(self) -> NDArray[np.int64]:
        return np.array([self._seed, self._episode, self._t, self._total])


def counting_errors(chunks: Sequence[Chunk]) -> list[str]:
    """Returns the errors in consecutive chunks of :class:`CountingEnv`; an empty list if there are none.

    Native sub-batches may need a step to reset environments, which is not `valid`: the observation after it begins an
    episode.
    """
    errors: list[str] = []

    def check(right: NDArray[np.bool_], rule: str) -> None:
        errors.extend(f"{rule}: chunk {number}, place {place.tolist()}" for place in np.argwhere(~right))

    def fresh(ended: Any) -> NDArray[Any]:
        return np.stack([ended[..., 0], ended[..., 1] + 1, 0 * ended[..., 2], ended[..., 3]], -1)

    for number, chunk in enumerate(chunks):
        before, after, done = chunk.obs, chunk.next_obs(), chunk.done
        following = np.concatenate([chunk.obs[1:], chunk.last_obs[None]])
        later = chunks[number + 1].valid[:1] if number + 1 < len(chunks) else np.zeros((1, chunk.num_envs), bool)
        is_none = ~chunk.valid & ~done & _equal(following, fresh(before), before)
        waits = done & ~np.concatenate([chunk.valid[1:], later]) & _equal(following, after)
        check(is_none | _equal(after[..., :2], before[..., :2]), "a transition stays in its episode")
        check(is_none | _equal(after[..., 2:], before[..., 2:] + 1), "a transition is one step")
        check(is_none | (chunk.rew == after[..., 3]), "the reward is that of the transition")
        goes_on = _equal(following, np.where(done[..., None], fresh(after), after))
        check(is_none | waits | goes_on, "the next observation follows")
        if number:
            check((chunk.obs[0] == chunks[number - 1].last_obs).all(-1), "a chunk begins where the last one ended")
    return errors


def _equal(obs: Any, *others: Any) -> NDArray[np.bool_]:
    """Returns where observations equal any of others, ``bool [T, N]``."""
    equal: NDArray[np.bool_] = np.logical_or.reduce([(obs == other).all(-1) for other in others])
    return equal


class CoinEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """Episodes of `short` or `long` steps with equal probability: a biased collector finds another mean."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, short: int = 1, long: int = 100) -> None:
        self._lengths = (short, long)
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        super().reset(seed=seed)
        self._left = self._lengths[int(self.np_random.integers(2))]
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Result:
        self._left -= 1
        return np.ones(1, np.float32), 1.0, self._left <= 0, False, {}


class FaultyEnv(CountingEnv):
    """A :class:`CountingEnv` that fails in its constructor, in a reset or in a step.

    Args:
        fault: ``"raise"`` an error; ``"hang"`` for ever; ``"kill"`` its own process.
        when: The method that fails.
        at: The call of it that fails, from 0.
        error: Makes the error to raise.
    """

    def __init__(
        self,
        fault: Literal["raise", "hang", "kill"],
        when: Literal["init", "reset", "step"] = "step",
        at: int = 0,
        error: Callable[[], BaseException] = lambda: ValueError("this environment is broken"),
    ) -> None:
        super().__init__(max_episode_steps=1000)
        self._fault, self._when, self._at, self._error = fault, when, at, error
        self._calls = {"init": 0, "reset": 0, "step": 0}
        self._maybe("init")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._maybe("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Result:
        self._maybe("step")
        return super().step(action)

    def _maybe(self, what: str) -> None:
        call = self._calls[what]
        self._calls[what] += 1
        if what != self._when or call != self._at:
            return
        if self._fault == "raise":
            raise self._error()
        if self._fault == "hang":
            while True:
                time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL)
