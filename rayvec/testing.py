"""Small environments and policies that make mistakes of whoever steps them visible; for tests, ours and users'.

The environments are deterministic functions of their seed and their actions, so that two ways to step them can
be held against each other; :func:`assert_identical` does that, data types and all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from rayvec.data import Chunk, Tree, tree_leaves
from rayvec.policies.noise import NoiseSpec

__all__ = [
    "CoinEnv",
    "CountingEnv",
    "DriftEnv",
    "FaultyEnv",
    "SpaceEnv",
    "TablePolicy",
    "TimedEnv",
    "WordSpace",
    "assert_identical",
    "counting_errors",
    "describe",
]

Result = tuple[Any, float, bool, bool, dict[str, Any]]
Start = tuple[Any, dict[str, Any]]


def assert_identical(got: Any, expected: Any, path: str = "value") -> None:
    """Asserts that two values are the same to the last bit: types, data types, shapes and contents.

    Args:
        got: Arrays, dicts, sequences or plain values, nested in any way.
        expected: What they must be.
        path: Where they stand, for the message.

    Raises:
        AssertionError: They differ; the message says where.

    >>> assert_identical({"x": np.zeros(2)}, {"x": np.zeros(2)})
    >>> assert_identical(np.zeros(2), np.zeros(2, np.float32))
    Traceback (most recent call last):
    AssertionError: value: dtype float64, expected float32
    """
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


def describe(value: Any) -> str:
    """Returns a text that tells apart any two actions that differ in a type, a data type, a shape or a value."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array:{value.dtype.str}{value.shape}:{value.tobytes().hex()}"
    if isinstance(value, np.generic):
        return f"{value.dtype.str}:{value.tobytes().hex()}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key!r}={describe(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (tuple, list, np.ndarray)):
        return f"{type(value).__name__}(" + ",".join(map(describe, value)) + ")"
    return f"{type(value).__name__}:{value!r}"


class WordSpace(Space[Any]):
    """A space that Gymnasium knows nothing of: dicts that hold a word and as many numbers as it has letters."""

    def __init__(self, letters: str = "abc") -> None:
        super().__init__(None, None)
        self.letters = letters

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        """Returns a random element."""
        length = int(self.np_random.integers(1, 5))
        word = "".join(self.np_random.choice(list(self.letters), length))
        return {"word": str(word), "numbers": self.np_random.normal(size=length)}

    def contains(self, x: Any) -> bool:
        """Says whether `x` is an element."""
        return isinstance(x, dict) and set(x["word"]) <= set(self.letters) and len(x["word"]) == len(x["numbers"])

    @property
    def is_np_flattenable(self) -> bool:
        """It is not."""
        return False

    def __eq__(self, other: object) -> bool:
        """Equal if made of the same letters."""
        return isinstance(other, WordSpace) and self.letters == other.letters

    __hash__ = None  # type: ignore[assignment]


class SpaceEnv(gymnasium.Env[Any, Any]):
    """Answers with samples of its spaces, of short random episodes, and with infos of many kinds.

    Every answer depends on the seed and on every bit of every action before it: the reward is a number made of
    :func:`describe` of the action, which also stands in the info.

    Args:
        observation_space: Of any kind.
        action_space: Of any kind.
        max_episode_steps: Episodes are 1 to so many steps long.
        infos: Whether to say anything in infos.
    """

    metadata = {"render_modes": ["rgb_array"], "kind": "space"}  # noqa: RUF012

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any] | None = None,
        max_episode_steps: int = 4,
        infos: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = deepcopy(observation_space)
        self.action_space = deepcopy(spaces.Discrete(2) if action_space is None else action_space)
        self.render_mode = render_mode
        self.factor = 1.0
        self._max_episode_steps = max_episode_steps
        self._infos = infos
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Begins an episode of random length."""
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self._left = int(self.np_random.integers(1, self._max_episode_steps + 1))
        info = self._info("reset") if self._infos else {}
        if options is not None:
            info["options"] = repr(sorted(options.items()))
        return self.observation_space.sample(), info

    def step(self, action: Any) -> Result:
        """Counts down; how the episode ends is a matter of chance."""
        self._left -= 1
        told = describe(action)
        reward = self.factor * (sum(told.encode()) % 1009) / 7 + float(self.np_random.normal())
        terminated = self._left <= 0 and bool(self.np_random.random() < 0.6)
        truncated = self._left <= 0 and (not terminated or bool(self.np_random.random() < 0.3))
        info = self._info("step") | {"action": told} if self._infos else {}
        return self.observation_space.sample(), reward, terminated, truncated, info

    def render(self) -> Any:
        """Returns a tiny picture of the steps left."""
        return np.full((2, 2, 3), self._left % 256, np.uint8)

    def scaled(self, x: float, *, by: float = 1.0) -> float:
        """Returns a product, for tests of calls."""
        return x * by * self.factor

    def _info(self, where: str) -> dict[str, Any]:
        random = self.np_random
        kinds: dict[str, Any] = {
            f"{where}_int": int(random.integers(-5, 5)),
            "float": float(random.normal()),
            "bool": bool(random.random() < 0.5),
            "text": f"{where}é",
            "none": None,
            "big": [2**70],
            "vector": random.normal(size=3).astype(np.float32),
            "scalar": np.int16(random.integers(100)),
            "float32": np.float32(random.normal()),
            "npbool": np.bool_(random.random() < 0.5),
            "mask": random.random(2) < 0.5,
            "zero_d": np.array(random.normal()),
            "empty": np.zeros((0, 2), np.int8),
            "list": [1, "two", 3.0],
            "tuple": (1, (2,)),
            "bytes": b"\x00\xff",
            "set": frozenset({where}),
            "nested": {"n_int": int(random.integers(9)), "deeper": {"x": random.integers(0, 255, (2, 2), np.uint8)}},
        }
        return {key: value for key, value in kinds.items() if random.random() < 0.4}


class CountingEnv(gymnasium.Env[NDArray[np.int64], Any]):
    """Counts in its observation: ``int64 [4]`` of its seed, its episode, the step within it, and all its steps.

    A transition that is doubled, lost, or that joins two episodes shows in :func:`counting_errors`. The reward
    of a step is the number of all steps; episodes are of 1 to `max_episode_steps` steps, by a rule that needs no
    chance; every other one is truncated.

    Args:
        max_episode_steps: Of the longest episode.
        step_s: How long a step sleeps, in seconds.
    """

    observation_space = spaces.Box(-(2**62), 2**62, (4,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, max_episode_steps: int = 7, step_s: float = 0.0) -> None:
        self._max = max_episode_steps
        self._step_s = step_s
        self._seed = self._episode = -1
        self._t = self._total = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Begins the next episode; a seed begins a new life."""
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._episode, self._total = seed, -1, 0
        self._episode += 1
        self._t = 0
        return self._obs(), {"began": self._episode}

    def step(self, action: Any) -> Result:
        """Counts."""
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
    """Returns what is wrong with consecutive chunks of :class:`CountingEnv`: nothing, if all is well."""
    errors: list[str] = []

    def check(right: NDArray[np.bool_], rule: str) -> None:
        errors.extend(f"{rule}: chunk {number}, place {place.tolist()}" for place in np.argwhere(~right))

    for number, chunk in enumerate(chunks):
        before, after = chunk.obs, chunk.next_obs()
        check((after[..., :2] == before[..., :2]).all(-1), "a transition stays in its episode")
        check((after[..., 2:] == before[..., 2:] + 1).all(-1), "a transition is one step")
        check(chunk.rew == after[..., 3], "the reward is that of the transition")
        following = np.concatenate([chunk.obs[1:], chunk.last_obs[None]])
        fresh = np.stack([after[..., 0], after[..., 1] + 1, 0 * after[..., 2], after[..., 3]], -1)
        done = chunk.done[..., None]
        check((following == np.where(done, fresh, after)).all(-1), "the next observation follows")
        if number:
            check((chunk.obs[0] == chunks[number - 1].last_obs).all(-1), "a chunk begins where the last one ended")
    return errors


class CoinEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """Episodes whose length is `short` or `long` steps, by the toss of a coin; every step is worth 1.

    Args:
        short: Steps of one kind.
        long: Steps of the other.
    """

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, short: int = 1, long: int = 100) -> None:
        self._lengths = (short, long)
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Tosses the coin."""
        super().reset(seed=seed)
        self._left = self._lengths[int(self.np_random.integers(2))]
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Result:
        """Comes one step closer to the end."""
        self._left -= 1
        return np.ones(1, np.float32), 1.0, self._left <= 0, False, {}


class DriftEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """A point that is pushed left or right and blown about by chance; it ends beyond 1, or after 40 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._state = np.zeros(2)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Begins near the middle."""
        super().reset(seed=seed)
        self._state, self._t = self.np_random.uniform(-0.3, 0.3, 2), 0
        return self._state.astype(np.float32), {}

    def step(self, action: Any) -> Result:
        """Pushes."""
        x, v = self._state
        v = 0.9 * v + 0.1 * (2 * int(action) - 1) + self.np_random.normal(0.0, 0.05)
        self._state, self._t = np.array([x + v, v]), self._t + 1
        gone = abs(self._state[0]) > 1.0
        return self._state.astype(np.float32), 1.0 - abs(x), bool(gone), not gone and self._t >= 40, {}


class TimedEnv(CountingEnv):
    """Steps that take time.

    Args:
        step_s: Seconds of one step.
        busy: Whether to burn CPU meanwhile, rather than sleep.
        max_episode_steps: Of the longest episode.
        infos: Whether it has anything to say, as a :class:`CountingEnv` has.
    """

    def __init__(self, step_s: float, busy: bool = False, max_episode_steps: int = 7, infos: bool = True) -> None:
        super().__init__(max_episode_steps, step_s=0.0 if busy else step_s)
        self._busy_s = step_s if busy else 0.0
        self._infos = infos

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Begins the next episode."""
        obs, info = super().reset(seed=seed, options=options)
        return obs, info if self._infos else {}

    def step(self, action: Any) -> Result:
        """Takes its time."""
        until = time.perf_counter() + self._busy_s
        while time.perf_counter() < until:
            pass
        obs, rew, terminated, truncated, info = super().step(action)
        return obs, rew, terminated, truncated, info if self._infos else {}


class FaultyEnv(CountingEnv):
    """Goes wrong in its constructor, in a reset or in a step.

    Args:
        fault: ``"raise"`` an error; ``"hang"`` for good; ``"kill"`` its own process; ``"exit"`` from it.
        when: In what.
        at: In which of them, from 0.
        error: What to raise.
    """

    def __init__(
        self,
        fault: Literal["raise", "hang", "kill", "exit"],
        when: Literal["init", "reset", "step"] = "step",
        at: int = 0,
        error: Callable[[], Exception] = lambda: ValueError("this environment is broken"),
    ) -> None:
        super().__init__(max_episode_steps=1000)
        self._fault, self._when, self._at, self._error = fault, when, at, error
        self._calls = {"init": 0, "reset": 0, "step": 0}
        self._maybe("init")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Resets, or goes wrong."""
        self._maybe("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Result:
        """Steps, or goes wrong."""
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
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)


class TablePolicy:
    """A policy that is exact by construction: integer arithmetic and a table, the same in any batch.

    It sums up the sixteenths of every number of an observation, looks the sum up in a table of integer weights,
    and draws a Discrete action by them with one uniform number; it records ``logp`` and the ``state``.

    Args:
        num_actions: Of the Discrete action space.
        num_states: Rows of the table; sums are taken modulo it.
        seed: Of the table.
    """

    noise = NoiseSpec("uniform", 1)
    _num_actions = 0

    def __init__(self, num_actions: int = 2, num_states: int = 64, seed: int = 0) -> None:
        table = np.random.default_rng(seed).integers(1, 9, (num_states, num_actions))
        self.load_weights(table.astype(np.float32).ravel(), num_actions)

    def load_weights(self, weights: NDArray[np.float32], num_actions: int | None = None) -> None:
        """Takes the table, row after row, as one flat vector of whole numbers."""
        self._num_actions = num_actions or self._num_actions
        table = np.rint(weights).astype(np.int64).reshape(-1, self._num_actions)
        self._table = table
        self._bounds = np.cumsum(table, 1)
        self._logp = np.log(table / table.sum(1, keepdims=True)).astype(np.float32)

    def weights(self) -> NDArray[np.float32]:
        """Returns the table as one flat vector, ``float32 [num_states * num_actions]``."""
        return self._table.astype(np.float32).ravel()

    def act(self, obs: Tree, noise: NDArray[np.float64]) -> tuple[Tree, dict[str, NDArray[Any]]]:
        """Looks actions up, ``int64 [k]``."""
        state = np.zeros(len(noise), np.int64)
        for leaf in tree_leaves(obs):
            sixteenths = np.floor(np.asarray(leaf, np.float64) * 16).astype(np.int64)
            state += sixteenths.reshape(len(noise), -1).sum(1)
        state %= len(self._table)
        bounds = self._bounds[state]
        actions = (noise[:, :1] * bounds[:, -1:] >= bounds).sum(1)
        return actions, {"logp": self._logp[state, actions], "state": state}
